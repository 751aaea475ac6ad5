"""Reports: written whole, no number that JSON does not know, every value with its mark and its error."""

from __future__ import annotations

import base64
import functools
import html.parser
import io
import json
import math
import re
import time
from dataclasses import MISSING, fields, replace
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from scipy.io import wavfile

from genmodels.core.likelihood import SingleValues, with_error
from genmodels.evaluation.report import Profile
from genmodels.evaluation.table import measured
from genmodels.report import compare, parts, render, schema, write_page
from genmodels.report.compare import report_target, write_report
from genmodels.report.figures import DARK, LIGHT, Field, Figure, Rule, Series, figure
from genmodels.report.likelihoods import histogram, histograms, out_of_distribution
from genmodels.report.parts import Model
from tests.report import example
from tests.report.browser import CHROMIUM, Browser


def test_numbers_that_are_not_finite_become_null(tmp_path):
    write_report({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}}, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


@pytest.mark.parametrize("of", [example.of_digits, example.of_speech, example.of_points])
def test_a_written_report_keeps_to_the_schema(of, tmp_path):
    check = Draft202012Validator(schema()).is_valid
    for model in of()[0].models:
        write_report(model, tmp_path / "r.json")
        found = json.loads((tmp_path / "r.json").read_text())
        assert check(found) and check({**found, "a key of tomorrow": 1}) and not check({**found, "format": 1})
        for key in ("created", "likelihood", "seconds"):
            assert not check({name: value for name, value in found.items() if name != key})
        line = found["likelihood"][0]
        assert check({**found, "likelihood": [{**line, "mean_nats": None}]})
        for change in ({"mean_nats": "2.1"}, {"kind": None}, {"worst": [{"index": 0}]}):
            assert not check({**found, "likelihood": [{**line, **change}]})
        assert not check({**found, "drift": {"warn": 1.0}})  # of a stage that was run, without `fail`


def test_error_digits():
    shown = {(1.23456, 0.00042): "1.2346(4)", (2.5, 3e-5): "2.500000(30)", (-1e-6, 1e-6): "-0.0000010(10)",
             (1.0, 0.0): "1.0000(0)", (math.nan, 0.1): "not finite", (1.0777e43, 1e41): "1.0777e+43 +- 1.0e+41",
             (12345.5, 3.0): "12345.5000(30000)", (12345678.9, 0.5): "1.234567890e+07 +- 5.0e-01",
             (2.5e7, math.inf): "25000000.0000 (error unknown)", (1.2e43, None): "1.2000e+43"}  # fmt: skip
    assert {given: with_error(*given) for given in shown} == shown
    assert measured(0.0, 1e-17) == "0.000000000000(0)" and measured(17.7981, 2.449) == "17.8(24)"


def test_errors_on_the_page_have_two_digits():
    """An error that is not zero is never shown as zero."""
    shown = {(0.00025, 0.00012): "0.00025 \u00b1 0.00012", (4.1e-5, 3.9e-5): "0.000041 \u00b1 0.000039",
             (1234.5, 0.5): "1,234.5000 \u00b1 0.5000", (1.0, 0.0): "1.0000 \u00b1 0.0000",
             (1.0, math.nan): "1.0000 \u00b1 not finite", (4.1e-5, None): "4.10e-05"}  # fmt: skip
    for given, words in shown.items():
        assert parts.with_error(*given) == words


def test_where_reports_go():
    best, other = Path("runs/a/best.ckpt"), Path("runs/a/last.ckpt")
    assert report_target(best, None, False) == Path("runs/a/report.json")
    assert report_target(other, None, False) == Path("runs/a/report_last.json")
    assert report_target(best, "x.json", False) == Path("x.json")
    assert report_target(best, None, False, "val", 5) == Path("runs/a/report_val_first5.json")
    assert report_target(best, "out", True) == Path("out/a/report.json")


HOSTILE = "\"'><script>alert(1)</script><img src=http://evil.example/x.png onerror=alert(1)>&amp;\x00"
TABLES = {
    "digits": example.of_digits, "points": example.of_points, "hostile": lambda: example.of_digits(HOSTILE),
    "long names": lambda: example.of_digits("_" + "x" * 150), "speech": example.of_speech,
    "hostile speech": lambda: example.of_speech(HOSTILE),
}  # fmt: skip


@functools.cache
def page_of(name: str) -> str:
    return render(*TABLES[name]())


class Reader(html.parser.HTMLParser):
    """Tags with their attributes, checked to be closed in order; the text between them."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(page)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def all(self, name: str) -> list[dict]:
        return [attributes for tag, attributes in self.tags if tag == name]


@pytest.mark.parametrize("name", TABLES)
def test_the_page_is_well_formed_and_holds_no_way_out(name):
    check_closed(page_of(name))


def check_closed(page: str) -> None:
    reader = Reader(page)
    assert not {"script", "iframe", "object", "form", "base"} & {tag for tag, _ in reader.tags}
    for tag, attributes in reader.tags:
        assert not [key for key in attributes if key.startswith("on")], (tag, attributes)
        for key in ("src", "href", "xlink:href"):
            assert attributes.get(key, "#").startswith(("data:", "#")), (tag, attributes[key])
    anchors = {attributes["id"] for _, attributes in reader.tags if "id" in attributes}
    assert {name for name in re.findall(r"url\(([^)]*)\)", page)} <= {f"#{name}" for name in anchors}
    assert {a["xlink:href"][1:] for a in reader.all("use")} <= anchors and "@import" not in page
    assert "default-src 'none'" in reader.all("meta")[1]["content"]


def test_a_page_that_did_not_escape_would_be_caught(monkeypatch):
    monkeypatch.setattr(compare, "TEMPLATES", compare.TEMPLATES.overlay(autoescape=False))
    table, _ = TABLES["hostile"]()
    light = replace(table.models[1], profile=Profile(), sweeps=[])  # without figures, which take long
    with pytest.raises(AssertionError):
        check_closed(render(replace(table, models=[light], rows=[]), [{}]))


def test_the_page_can_be_read_by_those_who_cannot_see_it():
    reader = Reader(page_of("digits"))
    assert all(attributes.get("scope") in ("col", "row", "rowgroup") for attributes in reader.all("th"))
    assert all(attributes.get("alt") for attributes in reader.all("img"))
    seen = [attributes for attributes in reader.all("svg") if attributes.get("aria-hidden") != "true"]
    assert seen and all(a["role"] == "img" and a["aria-label"] for a in seen)
    assert len(reader.all("caption")) == len(reader.all("table"))
    anchors = {attributes["id"] for _, attributes in reader.tags if "id" in attributes}
    assert all(attributes["href"][1:] in anchors for attributes in reader.all("a"))
    assert len(reader.all("h1")) == len(reader.all("main")) == 1 and reader.all("html")[0]["lang"] == "en"


def luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_words_and_curves_stand_out_from_the_paper(colours):
    for name, colour in colours.items():
        if name in ("paper", "panel", "line"):
            continue
        for ground in ("paper", "panel"):
            low, high = sorted([luminance(colour), luminance(colours[ground])])
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, ground)  # WCAG 2.1, 1.4.3


def test_kinds_are_never_ranked_together():
    body = page_of("digits").split('id="table"')[1].split("</table>")[0]
    groups = [body.index(title) for title in ("Bounds: the m", "Probability-flow ODE: a num", "Annealed importance s")]
    assert groups == sorted(groups)
    rows = re.findall(r"<tr.*?</tr>", body)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows[1:]]
    rank = re.findall(r"<th[^>]*>(.*?)</th>", rows[0]).index("rank")
    assert [(c[0], c[rank]) for c in cells if len(c) > 1] == [
        ("ddpm", "1"), ("glow", "2"), ("glow", ""), ("ddpm", ""), ("energy", "")
    ]  # the best line of a model has its rank; ODE and AIS stand alone, without one
    plots = re.findall(r"<figcaption>Likelihood of single items: (.*?)</figcaption>", page_of("digits"))
    assert plots == ["bounds", "probability-flow ODE", "annealed importance sampling"]


def test_every_value_carries_kind_error_and_recipe():
    reader = Reader(page_of("digits"))
    words = " ".join(reader.words)
    assert "\u2264 2.1000 \u00b1 0.0123 bits/dim" in words and "\u2248? 2.4000 \u00b1 0.0123 bits/dim" in words
    assert "all of 999 terms" in words and "2.3000 to 2.6000" in words and "64 chains" in words
    points = " ".join(Reader(page_of("points")).words)
    assert "no number: a field of scores has no energy" in points and "= 2.4000 \u00b1 0.0500 nats" in points


def test_whatever_is_missing_leaves_its_section_out():
    table, _ = example.of_digits()
    flow = table.models[1]  # without arrays: a page is made in no time
    one = replace(table, models=[flow], rows=[])
    light = replace(flow, profile=Profile(), sweeps=[])  # without figures, which take long
    for part in fields(light):
        if part.default_factory is not MISSING or part.default is not MISSING:
            empty = part.default if part.default_factory is MISSING else part.default_factory()
            without = {"items": {}} if part.name == "likelihood" else {}  # which are those of a line
            render(replace(one, models=[replace(light, **{part.name: empty}, **without)]), [{}])
    nothing = {"references": [], "rows": [], "ranking": [], "conclusions": [], "failures": [], "scale": None}
    for key, empty in nothing.items():
        render(replace(table, models=[light] * 3, **{key: empty}), [{}] * 3)
    without = render(one, [{}])
    for section, there in (("samples", False), ("neighbours", False), ("noise", False), ("layers", True)):
        assert f'id="{section}"' in page_of("digits") and (f'id="{section}"' in without) == there, section


def test_a_histogram_counts_every_item_and_says_what_it_leaves_out():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(size=997), [1e6, np.nan, np.inf]])
    found = histogram(["a"], [values], "title", "x")
    shares = [float(row[2]) for row in found.numbers.groups[0][1]]
    assert sum(shares) == pytest.approx(100, abs=0.01) and len(shares) == 31
    assert "Not finite, left out: 2." in found.notes[0] and "Beyond the ends" in found.notes[0]


def test_a_figure_draws_what_it_is_given():
    """Positions in the drawing grow with the values; gaps break a curve; dots are strokes of no length."""
    def points(found, colour):
        path = re.search(rf'<path d="([^"]*)"[^>]*style="fill: none; stroke(?:-dasharray: [^;]*; stroke-dashoffset: 0; '
                         rf'stroke)?: var\(--{colour}\)', found.svg)[1]
        return [(pen, float(x), float(y)) for pen, x, y in re.findall(r"([ML]) ([\d.]+) ([\d.]+)", path)]

    line = points(figure([Series("a", [1, 10, 100, 1000], [1.0, 2.0, None, 4.0])], "t", "x", "y", log_x=True), "c0")
    assert [pen for pen, _, _ in line] == ["M", "L", "M"] and line[0][2] > line[1][2] > line[2][2]
    assert (line[1][1] - line[0][1]) * 2 == pytest.approx(line[2][1] - line[1][1], abs=0.1)
    dots = points(figure([Series("a", [0, 1], [0, 1], "dots")], "t", "", "", field=Field((-1, 2, -1, 2))), "c0")
    assert dots[0][1:] == dots[1][1:] and dots[2][1:] == dots[3][1:]
    assert dots[2][1] - dots[0][1] == pytest.approx(dots[0][2] - dots[2][2], abs=0.1)  # one scale for both axes
    drawn = [figure([], "t", "", "", field=Field((0, 1, 0, top))).svg for top in (1, 2, 1e5)]  # the last as a square
    heights = [float(re.search(r'viewBox="0 0 360 ([\d.]+)"', svg)[1]) for svg in drawn]
    assert heights[0] == heights[2] < heights[1] < 2 * heights[0]
    ruled = figure([Series("a", [0, 1], [1, -1]), Series("b", [0, 1], [2, 1], colour=0, dash=1)], "t", "x", "$y$ <",
                   log_y=True, rules=[Rule("limit", 3.0)])
    assert ruled.legend == [("a", "c0", ""), ("b", "c0", "6 2.5"), ("limit", "soft", "2 3")]
    assert ruled.notes == ["1 values that are not positive or not finite are left out."]
    both = figure([Series("a", [0, 1, 2], [0, 1, None])], "t", "x", "y", log_x=True, log_y=True)
    assert both.notes == ruled.notes  # one point, whichever axis it does not fit
    assert figure([Series("a", [0, 1], [1, 1])], "t", "x", "y", log_x=True).notes == ruled.notes
    assert ">$y$ &lt;</text>" in ruled.svg and not re.search("#[0-9a-f]{6}", ruled.svg)
    assert ruled.numbers.groups[0][1][1] == ["a", "1", "-1"]


def test_values_of_single_items_are_drawn_only_where_they_stand_out_of_their_noise():
    table, arrays = example.of_points()
    model = Model(0, table.models[0], arrays[0])
    for single, drawn, said in (
        (SingleValues(0.1, 1.0), True, "noise of 0.1000 nats, items differ by 1.0000"),
        (SingleValues(2.0, 1.0), False, "drawn, the value of a single item has a noise of 2"),
        (SingleValues(None, 1.0), False, "drawn once, is not known"),
    ):
        model.report.likelihood[0].single = single
        (found,) = histograms([model], [])
        assert isinstance(found, Figure) is drawn and said in (" ".join(found.notes) if drawn else found.words)
    table, arrays = example.of_digits()
    table.models[0].likelihood[0].single = SingleValues(0.7, 0.25)
    _, gallery = out_of_distribution([Model(0, table.models[0], arrays[0])])
    words = "Of the test items the value of a single item has a noise of 0.7000 bits/dim"
    assert gallery.parts[0].notes[0].startswith(words)


def test_items_of_unlike_lengths_are_drawn_in_the_unit_of_their_line():
    table, arrays = example.of_points()
    line = table.models[0].likelihood[0]
    lengths = np.linspace(100, 900, line.n).round()
    line.unit = "nats_per_dim"
    model = Model(0, table.models[0], arrays[0] | {line.values: -2.5 * lengths, f"dims_of_{line.values}": lengths})
    assert model.costs(line) == pytest.approx(np.full(line.n, 2.5))
    line.unit = "bits_per_character"
    assert model.costs(line) == pytest.approx(np.full(line.n, 2.5 / math.log(2)))


@pytest.mark.parametrize("split, said, models", [("val", "validation item", 1), ("train", "training item", 3)])
def test_the_page_names_the_split(split, said, models):
    table, arrays = example.of_digits()
    rows, arrays = [row for row in table.rows if row.model < models], arrays[:models]
    table = replace(table, models=table.models[:models], rows=rows)
    for one in table.models:
        one.data = replace(one.data, split=split)
    page = render(table, arrays)
    assert said in page and "test item" not in page


def test_the_file_is_written_whole(tmp_path):
    write_page(*example.of_points(), tmp_path / "report.html")
    said = (tmp_path / "report.html").read_text()
    assert "Its integral is 1.07000 on a grid: not one, the check failed." in said and "large box" not in said
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8").endswith("</html>\n")


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium here (apt-get install chromium): the page is not seen in a browser")
    browser = Browser()
    yield browser
    browser.close()


#: Elements that stick out to the right of the window, those aside that scroll within a box of their own.
STICKING_OUT = """(width => [...document.querySelectorAll('body *')].filter(e =>
    !e.closest('.scroll') && !e.closest('svg')
    && e.getBoundingClientRect().right > width + 1).map(e => e.outerHTML.slice(0, 80)))"""


@pytest.mark.parametrize("name", ["digits", "points", "long names", "speech"])
def test_in_a_browser_nothing_overflows_nothing_is_requested_nothing_complains(browser, tmp_path, name):
    page = tmp_path / "report.html"
    page.write_text(page_of(name), encoding="utf-8")
    for width in (360, 768, 1400):
        browser.open(page, width)
        assert browser.value("document.documentElement.scrollWidth <= innerWidth && innerWidth") == width
        assert browser.value(f"{STICKING_OUT}({width})") == []
        assert browser.complaints() == [] and browser.requests() == [page.as_uri()]
    assert browser.value("[...document.images].every(i => i.complete && i.naturalWidth > 0)")


def heard(attributes: dict) -> tuple[int, np.ndarray]:
    head, _, coded = attributes["src"].partition(",")
    assert head == "data:audio/wav;base64"
    return wavfile.read(io.BytesIO(base64.b64decode(coded, validate=True)))


def test_sound_of_the_page_is_that_of_the_arrays():
    """A row for each text: both models, then the recording; what cannot be played is said."""
    _, arrays = example.of_speech()
    reader = Reader(page_of("speech"))
    found = reader.all("audio")
    assert [one["aria-label"] for one in found] == [
        "glow_tts: turn right", "mel_ddpm: turn right", "recording, vocoded: turn right", "glow_tts: turn left",
        "recording, vocoded: turn left"]
    expected = [arrays[0]["sound_0"], arrays[1]["sound_0"], arrays[1]["vocoded_0"], arrays[0]["sound_1"],
                arrays[1]["vocoded_1"]]  # fmt: skip
    for one, samples in zip(found, expected, strict=True):
        rate, same = heard(one)
        assert rate == 8000 and np.array_equal(same, samples) and "controls" in one
    assert "louder than any sound" in page_of("speech") and "media-src data:" in reader.all("meta")[1]["content"]
    assert not Reader(page_of("points")).all("audio") and "Griffin-Lim" not in page_of("points")


def test_samples_of_classes_are_played_by_class():
    table, arrays = example.of_spoken_digits()
    found = Reader(render(table, arrays)).all("audio")
    assert [one["aria-label"] for one in found] == ["ddpm: no", "ddpm: yes", "ddpm: stop"]
    assert [int(heard(one)[1][0]) for one in found] == [100, 200, 300]


def test_the_browser_plays_the_sound(browser, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(page_of("speech"), encoding="utf-8")
    browser.open(page, 768)
    lengths = "[...document.querySelectorAll('audio')].map(a => a.duration)"
    for _ in range(50):
        if all(found := browser.value(lengths)):
            break
        time.sleep(0.1)
    assert found == [0.5] * 5 and browser.complaints() == []


def test_the_browser_obeys_the_reader(browser, tmp_path):
    page = tmp_path / "report.html"
    write_page(*example.of_points(), page)
    colour = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for scheme, media in (("light", ""), ("dark", ""), ("dark", "print")):
        browser.open(page, 1400, scheme, media)
        seen[scheme, media] = browser.value(colour)
    assert seen == {("light", ""): "rgb(255, 255, 255)", ("dark", ""): "rgb(22, 22, 24)",
                    ("dark", "print"): "rgb(255, 255, 255)"}  # fmt: skip


def test_the_browser_would_see_a_page_that_is_not_well_behaved(browser, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text("<meta name=viewport content='width=device-width'><p style='width:500px'>wide</p>"
                    "<img src='http://127.0.0.1:9/x.png'><script>console.error('oh')</script>")
    browser.open(page, 360)
    assert browser.value("document.documentElement.scrollWidth > 360") and browser.value(f"{STICKING_OUT}(360)")
    assert len(browser.requests()) == 2 and any("oh" in text for text in browser.complaints())


def test_a_hostile_name_runs_nothing_and_fetches_nothing(browser, tmp_path):
    page = tmp_path / "hostile.html"
    page.write_text(page_of("hostile"), encoding="utf-8")
    browser.open(page, 768)
    assert browser.requests() == [page.as_uri()] and browser.complaints() == []
    assert browser.value("document.scripts.length") == 0
    assert "<script>alert(1)" in browser.value("document.body.innerText")


def test_captions_count_the_samples_that_are_shown():
    """Of 64 samples 60 stand in whole columns of ten classes; a model by itself has the page's width for them."""
    table, arrays = example.of_digits()
    alone = render(replace(table, models=table.models[:1], rows=[]), arrays[:1])
    for page, columns, models in ((page_of("digits"), 10, 3), (alone, 20, 1)):
        assert page.count("samples 0 to 59") == models and "0 to 63" not in page
        assert page.count(f"60 samples of ddpm in {columns} columns") == 1
    assert ".gallery>figure:only-child{grid-column:1/-1}" in alone
    # Where a class has run out of items, its column would hold those of another.
    key = table.models[0].samples.cond
    uneven = [dict(arrays[0]) | {key: np.where(np.arange(len(arrays[0][key])) < 40, arrays[0][key], 0)}]
    page = render(replace(table, models=table.models[:1], rows=[]), uneven)
    assert "for each class" in alone and "for each class" not in page and "row by row" in page
