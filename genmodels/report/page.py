"""The report of an evaluation as one page of HTML that needs no network and no script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import yaml

from genmodels.core.files import write_whole
from genmodels.report import likelihoods, quality
from genmodels.report import likelihoods as planes
from genmodels.report import likelihoods as surprise
from genmodels.report import quality as profiles
from genmodels.report.view import UNITS, Markup, Model, facts, listing, number, tag, typeset, with_error

#: Names of colours in light and dark. c0 ... c7 tell curves apart, and dashes tell them apart where colours do not.
LIGHT = {
    "paper": "#ffffff", "panel": "#f5f5f2", "ink": "#1c1b19", "soft": "#5a5752", "line": "#d9d6d0",
    "link": "#0b5394", "good": "#17663a", "bad": "#b3261e", "odd": "#7a4f00",
    "c0": "#0b5fa5", "c1": "#c2410c", "c2": "#0a7a5a", "c3": "#9b1fae",
    "c4": "#7d6200", "c5": "#0e7490", "c6": "#be123c", "c7": "#57534e",
}
DARK = {
    "paper": "#161618", "panel": "#222225", "ink": "#ecebe8", "soft": "#aeaba5", "line": "#3d3d42",
    "link": "#8ec5ff", "good": "#6fd59a", "bad": "#ff9a92", "odd": "#f2c14e",
    "c0": "#6cb2f7", "c1": "#ff9561", "c2": "#4fd1a5", "c3": "#e08bf0",
    "c4": "#e2c044", "c5": "#5fd0e6", "c6": "#ff8aa5", "c7": "#c4c0b8",
}


def variables(colours: dict[str, str]) -> str:
    """Colours as custom properties of CSS.

    Example:
        >>> variables({"ink": "#000000"})
        '--ink:#000000;'
    """
    return "".join(f"--{name}:{value};" for name, value in colours.items())


_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0 auto;max-width:75rem;padding:1rem;background:var(--paper);color:var(--ink);
 font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25;margin:.5rem 0}
h2{font-size:1.2rem;margin:2.2rem 0 .5rem;padding-top:.6rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.2rem 0 .3rem}
p{margin:.4rem 0;max-width:48rem}
a{color:var(--link)}
code,pre{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;font-size:.85em}
pre{background:var(--panel);padding:.7rem;white-space:pre-wrap;border-radius:4px;margin:.4rem 0}
nav ul,.legend,.facts,.items{list-style:none;padding:0;margin:.4rem 0}
nav ul{display:flex;flex-wrap:wrap;gap:.2rem .9rem;font-size:.9rem}
.note,.soft{color:var(--soft);font-size:.85rem}
.good{color:var(--good)}.bad{color:var(--bad)}.odd{color:var(--odd)}
.headline{display:grid;gap:.5rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,16rem),1fr));margin:.8rem 0;
 padding:0;list-style:none}
.headline li{background:var(--panel);border-radius:6px;padding:.6rem .8rem}
.headline b{display:block;font-size:1.35rem;line-height:1.3}
.gallery{display:grid;gap:1rem 1.4rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,20.5rem),1fr));
 margin:.6rem 0}
figure{margin:0;min-width:0}
.gallery>figure:only-child{grid-column:1/-1}
.gallery>.grid:only-child .sheet{max-width:none}
@media screen and (min-width:60rem){
 .gallery>.plot:only-child{display:grid;grid-template-columns:minmax(0,36rem) minmax(0,1fr);column-gap:1.4rem;
  grid-template-rows:repeat(5,auto) 1fr}
 .gallery>.plot:only-child>figcaption{grid-column:1/-1}
 .gallery>.plot:only-child>svg{grid-column:1;grid-row:2/7;max-width:36rem}
 .gallery>.plot:only-child>:not(svg,figcaption){grid-column:2}
}
figcaption{font-weight:600;font-size:.9rem;margin-bottom:.2rem}
svg{display:block;width:100%;height:auto;max-width:32rem}
svg text{font:11px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:var(--soft)}
svg text.left{text-anchor:end}svg text.middle{text-anchor:middle}svg text.label{fill:var(--ink)}
.axes line{stroke:var(--soft);stroke-width:1}.axes line.mesh{stroke:var(--line);stroke-width:.7}
.series{stroke:currentColor}.series circle{fill:currentColor;stroke:none}
.curve{fill:none;stroke:currentColor;stroke-width:1.7;stroke-linejoin:round}
.area{fill:currentColor;fill-opacity:.16;stroke:none}.error{fill:none;stroke:currentColor;stroke-width:1}
.dots{fill:none;stroke:currentColor;stroke-width:1.6;stroke-linecap:round}
.rule{fill:none;stroke:var(--soft);stroke-width:1.3;stroke-dasharray:2 3}
.r1{stroke-dasharray:9 3}.r2{stroke-dasharray:9 3 2 3}
.d1 .curve{stroke-dasharray:6 2.5}.d2 .curve{stroke-dasharray:2 2}.d3 .curve{stroke-dasharray:8 2 2 2}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}
.c4{color:var(--c4)}.c5{color:var(--c5)}.c6{color:var(--c6)}.c7{color:var(--c7)}
.legend{display:flex;flex-wrap:wrap;gap:.1rem .9rem;font-size:.82rem}
.legend .key{display:inline-block;width:24px;height:10px;margin-right:.35rem;vertical-align:middle}
.sheet{display:block;width:100%;height:auto;max-width:34rem;image-rendering:pixelated}
.items{display:grid;gap:.5rem;grid-template-columns:repeat(auto-fill,minmax(4.6rem,1fr))}
.items li{font-size:.72rem;color:var(--soft);line-height:1.3}
.items img{display:block;width:100%;max-width:7rem;height:auto;image-rendering:pixelated}
table{border-collapse:collapse;width:100%;font-size:.85rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);font-size:.85rem;padding:.2rem 0}
th,td{text-align:left;vertical-align:top;padding:.28rem .5rem;border-bottom:1px solid var(--line);
 overflow-wrap:break-word}
.long{overflow-wrap:anywhere}
thead th{border-bottom:2px solid var(--soft)}
tbody th[scope=rowgroup]{background:var(--panel);font-weight:600;padding-top:.5rem}
tbody th[scope=row]{font-weight:600}
.scroll{overflow-x:auto;max-width:100%}
.scroll:focus-visible,summary:focus-visible,a:focus-visible{outline:2px solid var(--link);outline-offset:2px}
.numbers{width:auto;font-size:.78rem}
details{margin:.3rem 0}summary{cursor:pointer;color:var(--link);font-size:.82rem}
details .scroll{max-height:20rem;overflow:auto}
.confusion td,.confusion th{text-align:right;padding:.15rem .35rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;font-size:.88rem;margin:.4rem 0}
dt{color:var(--soft)}dd{margin:0;min-width:0}
@media screen and (max-width:45rem){
 body{padding:.75rem}
 table.cards,table.cards tbody,table.cards tr,table.cards th,table.cards td,table.cards caption{display:block}
 table.cards thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
 table.cards tr{border-bottom:1px solid var(--line);padding:.45rem 0}
 table.cards th,table.cards td{border:0;padding:.06rem 0}
 table.cards td{display:grid;grid-template-columns:minmax(6.5rem,32%) 1fr;gap:.6rem}
 table.cards td:empty,table.cards td.nothing{display:none}
 table.cards td::before{content:attr(data-label);color:var(--soft)}
 table.cards th[scope=rowgroup]{padding:.4rem .5rem}
 dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.3rem}
}
@page{margin:14mm}
@media print{
 body{max-width:none;padding:0;font-size:10pt}
 nav,details:not([open]){display:none}
 h2,h3,figcaption,caption{break-after:avoid}
 figure,tr,.headline li,.items li{break-inside:avoid}
 svg{max-width:21rem}.sheet{max-width:21rem}h2{margin-top:1rem}dl{grid-template-columns:max-content 1fr}
 thead{display:table-header-group}
 table{font-size:7pt}th,td{padding:.15rem .25rem}
 tr.title{break-after:avoid}
 .scroll{overflow:visible}details .scroll{max-height:none}
 .gallery{grid-template-columns:repeat(2,1fr)}
 .area,.c0,.c1,.c2,.c3,.c4,.c5,.c6,.c7{print-color-adjust:exact;-webkit-print-color-adjust:exact}
}
"""


def sheet_of_style() -> str:
    """The whole style sheet: light unless the reader prefers dark, and always light on paper."""
    light, dark = variables(LIGHT), variables(DARK)
    return (f":root{{color-scheme:light dark;{light}}}"
            f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}{_RULES}")


#: A browser that keeps to this loads nothing from anywhere and runs no script, whatever a name in a table says.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_page(table: dict, arrays: list[Mapping[str, np.ndarray]], target: Path | str) -> None:
    """Write report.html whole.

    Arguments:
        table: the table as plain types, with one report under `models` for each model; what is missing leaves its
            section out.
        arrays: the arrays of each model, in the same order: likelihoods of items, samples, densities.
        target: the file.
    """
    page = render(table, arrays)
    write_whole(target, lambda file: file.write(page + "\n"), mode="w")


def render(table: dict, arrays: list[Mapping[str, np.ndarray]]) -> str:
    """The page as text.

    Example:
        >>> page = render({"models": [{"name": "<mine>"}]}, [])
        >>> page.startswith("<!doctype html>"), "&lt;mine&gt;" in page, "<mine>" in page
        (True, True, False)
    """
    reports = table.get("models") or []
    own = [*arrays, *({} for _ in reports[len(arrays):])]
    models = [Model(k, report, own[k]) for k, report in enumerate(reports)]
    parts = [(name, title, content) for name, title, make in SECTIONS if (content := _filled(make(table, models)))]
    title = _title(table, models)
    links = tag("nav", tag("ul", *(tag("li", tag("a", heading, href=f"#{name}")) for name, heading, _ in parts)),
                aria_label="Sections")
    sections = [tag("section", tag("h2", heading, id=f"{name}-title"), *content, id=name,
                    aria_labelledby=f"{name}-title") for name, heading, content in parts]
    head = tag(
        "head", tag("meta", charset="utf-8"), tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"), tag("meta", name="referrer", content="no-referrer"),
        tag("link", rel="icon", href="data:,"), tag("title", title), tag("style", Markup(sheet_of_style())),
    )
    body = tag("body", tag("header", tag("h1", title), *_introduction(table), links),
               tag("main", *sections), tag("footer", *_footer(table)))
    return "<!doctype html>" + tag("html", head, body, lang="en")


def _filled(content) -> list:
    parts = content if isinstance(content, list) else [content]
    return [part for part in parts if part]


def _title(table: dict, models: list[Model]) -> str:
    data = table.get("data") or (models[0].data if models else {})
    who = models[0].name if len(models) == 1 else f"{len(models)} models"
    where = f" on {data['name']}, {data.get('split', 'test')} split" if data.get("name") else ""
    return f"Evaluation of {who}{where}"


def _introduction(table: dict) -> list:
    data, made = table.get("data") or {}, table.get("genmodels") or {}
    items = None
    if data.get("items") is not None:
        some = "the first " if data.get("limited") else ""
        items = f"{some}{number(data['items'])} items of shape {tuple(data.get('event_shape') or ())}"
        items += f", {data['levels']} levels" if data.get("levels") else ", continuous"
        items += f"; hash of the items {str(data['item_hash'])[:12]}" if data.get("item_hash") else ""
    machine = facts({"genmodels" if key == "version" else key: made.get(key)
                     for key in ("version", "torch", "python", "device", "threads")})
    lines = [items, table.get("created"), machine]
    return [tag("p", ". ".join(str(line) for line in lines if line) + ".", class_="soft")] if any(lines) else []


def _summary(table: dict, models: list[Model]) -> list:
    proved = [tag("li", sentence) for sentence in table.get("proved") or []]
    troubles = [f"{f.get('path')}: {f.get('message')}" for f in table.get("failures") or []]
    troubles += [f"{model.name}: {said}" for model in models for said in model.get("failed") or []]
    warnings = [*(table.get("warnings") or []),
                *(f"{model.name}: {said}" for model in models for said in model.get("warnings") or [])]
    partial = [f"{model.name}: the evaluation was interrupted, later stages are missing" for model in models
               if model.get("partial")]
    return [
        likelihoods.headline(models) if models else None,
        *(tag("p", tag("strong", "Failed: "), said, class_="bad") for said in troubles),
        *(tag("p", tag("strong", "Note: "), said, class_="odd") for said in dict.fromkeys([*partial, *warnings])),
        tag("h3", "What is proved") if proved else None, tag("ul", *proved) if proved else None,
    ]


def _table(table: dict, models: list[Model]) -> list:
    body = likelihoods.main_table(table, models)
    if body is None:
        return []
    told = [str(note) for note in table.get("notes") or []]
    notes = [tag("li", typeset(note)) for note in told if not note.startswith("note: ")]  # those stand in the summary
    for known in table.get("references") or []:
        if known.get("value") is not None and not any(f"{known.get('name')} " in note for note in told):
            unit = UNITS.get(known.get("unit"), known.get("unit"))
            value = with_error(known["value"], known.get("error"))
            notes.append(tag("li", f"Reference: {known.get('name')} {value} {unit}"))
    return [body, tag("ul", *notes, class_="note") if notes else None]


def _likelihoods(table: dict, models: list[Model]) -> list:
    figures = likelihoods.histograms(models, table.get("references") or [])
    return [tag("div", *figures, class_="gallery") if figures else None, *likelihoods.extremes(models)]


def _checks(table: dict, models: list[Model]) -> list:
    words = {"passed": tag("span", "\u2713 passed", class_="good"),
             "failed": tag("span", "\u2717 failed", class_="bad"),
             "not verified": tag("span", "\u2013 not verified", class_="odd")}
    groups = []
    for model in models:
        rows = [[one.get("name"), words[one.get("status")], number(one.get("error")), number(one.get("tolerance")),
                 one.get("note")] for one in model.get("checks") or []]
        if rows:
            groups.append((model.name, rows))
    columns = ["check", "result", "error", "tolerance", "note"]
    return [listing(columns, groups, "What was checked on the models")] if groups else []


def _making(table: dict, models: list[Model]) -> list:
    parts = [likelihoods.recipes(models)]
    for model in models:
        checkpoint = model.get("checkpoint") or {}
        known = [part for key, value in checkpoint.items() if value is not None
                 for part in (tag("dt", key.replace("_", " ")), tag("dd", number(value)))]
        parts.append(tag("section", tag("h3", model.name), tag("dl", *known) if known else None, _config(model)))
    if table.get("command"):
        parts += [tag("h3", "The command that made this page"), tag("pre", table["command"])]
    return parts


def _config(model: Model) -> Markup | None:
    config = model.get("config")
    if not config:
        return None
    written = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    return tag("details", tag("summary", f"the whole configuration of {model.name}"), tag("pre", written))


def _footer(table: dict) -> list:
    version = (table.get("genmodels") or {}).get("version")
    return [tag("p", f"Written by genmodels{f' {version}' if version else ''}. This file is complete: it loads nothing "
                     "and runs no script.", class_="soft")]


def _gallery(figures: list) -> Markup | None:
    return tag("div", *figures, class_="gallery") if figures else None


#: The sections in their order: anchor, title, and what fills them; one that has nothing to show is left out.
SECTIONS: list[tuple[str, str, Callable]] = [
    ("summary", "In short", _summary),
    ("table", "The table", _table),
    ("samples", "Samples from the same seed", lambda table, models: _gallery(quality.samples(models))),
    ("likelihood", "Likelihood of single items", _likelihoods),
    ("noise", "Bits by noise level", lambda table, models: _gallery(
        profiles.by_noise_level(models) + profiles.by_temperature(models))),
    ("layers", "Flows layer by layer", lambda table, models: profiles.by_layer(models)),
    ("density", "Densities", lambda table, models: _gallery(planes.densities(models))),
    ("outside", "Other data", lambda table, models: surprise.out_of_distribution(models)),
    ("fidelity", "Samples against data", lambda table, models: quality.fidelity(models, table.get("scale"))),
    ("neighbours", "Nearest training items", lambda table, models: quality.neighbours(models)),
    ("sweeps", "Steps and temperatures", lambda table, models: _gallery(quality.sweeps(models))),
    ("cost", "Cost", lambda table, models: quality.cost(models)),
    ("checks", "Checks", _checks),
    ("making", "How every number was made", _making),
]
