"""Tables of docs/results_small.md and docs/results.md: every family on the same data, by the same code, several seeds.

    python benchmarks/results.py --sets digits 8gaussians --seeds 0 1 2
    python benchmarks/results.py --sets mnist-half-hour --seeds 0 --root ~/data --given tarflow=<run>

A run is `genmodels train` with the defaults of its data, in a folder under --out; one `genmodels evaluate` over all
models of a seed makes a table of the same items. What is there already is not made again, so that the command may be
stopped and repeated; a run of other settings than today's is refused. --page puts the tables that are there into a
page. Minutes are CPU time of training, with --threads threads.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

from genmodels.evaluation.report import Measures, Scale
from genmodels.evaluation.table import MEASURES, measured, on_scale

#: What is trained on each data set: the model's name in the table, and what is said to `genmodels train`.
RUNS = {
    "digits": {
        "realnvp": ["model=realnvp", "data=digits"],
        "glow": ["model=glow", "data=digits"],
        "nsf": ["model=nsf", "data=digits"],
        "jet": ["model=jet", "data=digits"],
        "tarflow": ["model=tarflow", "data=digits"],
        "ddpm": ["model=ddpm", "data=digits"],
        "flow_matching": ["model=flow_matching", "data=digits"],
        "masked_diffusion": ["model=masked_diffusion", "data=digits"],
        "score": ["model=score", "data=digits"],
        "energy_ddpm": ["model=energy_ddpm", "data=digits"],
        "energy": ["model=energy", "data=digits", "model.loss=denoising", "model.objective.sigma=0.3",
                   "trainer.max_steps=1000"],
    },
    "8gaussians": {
        "realnvp": ["model=realnvp", "data=toy", "data.set=8gaussians", "trainer.max_steps=2000"],
        "nsf": ["model=nsf", "data=toy", "data.set=8gaussians", "trainer.max_steps=2000"],
        "maf": ["model=maf", "data=toy", "data.set=8gaussians", "trainer.max_steps=2000"],
        "ddpm": ["model=ddpm", "data=toy", "data.set=8gaussians", "trainer.max_steps=2000"],
        "score": ["model=score", "data=toy", "data.set=8gaussians", "trainer.max_steps=2000"],
        "energy": ["model=energy", "data=toy", "data.set=8gaussians", "trainer.max_steps=1000"],
    },
    "mnist-half-hour": {
        "realnvp": ["model=realnvp", "data=mnist"],
        "glow": ["model=glow", "data=mnist"],
        "nsf": ["model=nsf", "data=mnist"],
        "maf": ["model=maf", "data=mnist"],
        "flow++": ["model=glow", "data=mnist", "model.coupling=mixture", "model.attention=rope2d", "model.steps=4",
                   "model.hidden=64", "trainer.max_steps=1500"],
        "jet": ["model=jet", "data=mnist"],
        "tarflow": ["model=tarflow", "data=mnist"],
        "ddpm": ["model=ddpm", "data=mnist"],
        "ddpm, likelihood": ["experiment=ddpm_mnist_likelihood", "data=mnist"],
        "flow_matching": ["model=flow_matching", "data=mnist", "trainer.max_steps=3000"],
        "masked_diffusion": ["model=masked_diffusion", "data=mnist"],
        "score": ["model=score", "data=mnist"],
        "energy_ddpm": ["model=energy_ddpm", "data=mnist"],
    },
}
RUNS["fashion-half-hour"] = {
    name: [word.replace("data=mnist", "data=fashion_mnist") for word in words]
    for name, words in RUNS["mnist-half-hour"].items()
}
#: What is said to `genmodels evaluate`.
EVALUATION = {
    "digits": ["ode=true", "ode_options.divergence=hutchinson", "ode_options.tolerance=1e-3",
               "importance_samples=[1,64]", "chains=64", "densities=300", "samples=200",
               "stages=[likelihood,fidelity,cost]"],
    "8gaussians": ["ode=true", "draws=100", "samples=500", "stages=[likelihood,fidelity,cost]"],
    "fashion-half-hour": ["importance_samples=1", "draws=5", "samples=1000", "stages=[likelihood,fidelity,cost]"],
    "mnist-half-hour": ["importance_samples=1", "draws=5", "samples=1000", "stages=[likelihood,fidelity,cost]"],
}

_LENGTH = ("max_steps", "validate_every_n_steps", "limit_validation")  # what counts of the settings of the trainer


def run(command: str, words: list[str]) -> None:
    """One command of genmodels in this process."""
    from genmodels.cli.main import main

    code = main([command, *words])
    if code:
        raise SystemExit(f"genmodels {command} {' '.join(words)}: exit code {code}")


def train(folder: Path, words: list[str], seed: int) -> None:
    """Train, or go on with what was begun, unless that has been done."""
    from genmodels.core.checkpoint import read_header

    last = folder / "last.ckpt"
    begun = last.exists()
    if begun and read_header(last)["finished"]:
        check_current(read_header(last)["config"], folder, words)
        return
    run("train", [*words, f"seed={seed}", f"run_dir={folder}", "logger=csv", "trainer.sample_every_n_steps=0",
                  "trainer.progress=false", *(["resume=last"] if begun else [])])  # fmt: skip


def check_current(config: dict, folder: Path, words: list[str]) -> None:
    """Stop where a finished run has other settings than these words say today, for example after a change of a preset.

    What a command says is a part of the configuration of a run, which has the defaults too.
    """
    from genmodels.cli.compose import composer
    from genmodels.core.files import flat

    with composer("train") as hydra:
        wanted = hydra.compose(words)
    for part in ("model", "data", "trainer"):
        then = flat(config[part])
        for key, value in flat(wanted[part]).items():
            if key != "root" and (part != "trainer" or key in _LENGTH) and then.get(key) != value:
                raise SystemExit(f"{folder}: {part}.{key} was {then.get(key)!r} and is {value!r} today: delete the "
                                 "folder to train it again")


def make(name: str, seeds: list[int], given: argparse.Namespace) -> None:
    """Train and evaluate one data set, seed by seed."""
    where = [] if given.root is None else [f"data.root={given.root}"]
    own = dict(pair.split("=", 1) for pair in given.given)
    for seed in seeds:
        folders = []
        for model, words in RUNS[name].items():
            folder = given.out / name / f"{model.replace(', ', '_')}-{seed}"
            if model in own:
                folder = Path(own[model])
            else:
                train(folder, [*words, *where], seed)
            folders.append(folder / "best.ckpt")
        table = given.out / name / f"table-{seed}"
        if not is_whole(table / "table.json", folders, EVALUATION[name]):
            start = time.monotonic()
            listed = ",".join(map(str, folders))
            run("evaluate", [f"ckpt=[{listed}]", f"out={table}", *EVALUATION[name]])
            (table / "words.json").write_text(json.dumps(EVALUATION[name]))
            print(f"{name}, seed {seed}: evaluated in {time.monotonic() - start:.0f} s", flush=True)


def is_whole(table: Path, checkpoints: list[Path], words: list[str]) -> bool:
    """Whether a table is there and is that of these checkpoints, evaluated by these words."""
    from genmodels.core.checkpoint import checkpoint_hash

    said = table.with_name("words.json")
    if not table.exists() or not said.exists() or json.loads(said.read_text()) != words:
        return False
    known = [model["checkpoint"]["sha256"] for model in json.loads(table.read_text())["models"]]
    return known == [checkpoint_hash(file) for file in checkpoints]


def mean_and_spread(values: list[float | None], digits: int) -> str:
    """Mean of the seeds, and their standard deviation in brackets where there are several."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    if not known:
        return ""
    spread = f" ({statistics.stdev(known):.{digits}f})" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.{digits}f}{spread}"


def over_seeds(found: list[dict], key: str, error: str) -> str:
    """The mean over the seeds with the standard error of one: seeds share their items, whose error no mean reduces."""
    known = [(one[key], one[error]) for one in found if one.get(key) is not None]
    if not known:
        return ""
    values, errors = zip(*known, strict=True)
    return measured(statistics.fmean(values), math.sqrt(statistics.fmean(e**2 for e in errors)))


def as_markdown(tables: list[dict], labels: list[str]) -> str:
    """The lines of one data set: a row for each likelihood of each model, means over the tables of all seeds."""
    data = tables[0]["data"]
    unit, key, places = ("bits/dim", "bits_per_dim", 3) if data["levels"] else ("nats", "nll", 4)
    rows = [["model", unit, "kind, how", "SE", "above the entropy", "Fréchet", "kernel distance", "precision", "recall",
             "network evaluations", "samples/s", "parameters", "step", "CPU minutes"]]  # fmt: skip
    for m, label in enumerate(labels):
        models = [table["models"][m] for table in tables]
        for k, line in enumerate(models[0]["likelihood"]):
            found = [model["likelihood"][k] for model in models]
            value = mean_and_spread([one.get(key) for one in found], places)
            cells = [label if k == 0 else "", f"{line['mark']} {value}" if value else "none",
                     line["kind"] + (f", {line['how']}" if line["how"] else ""),
                     mean_and_spread([found[0].get("se_data")], places), over_seeds(found, "kl_paired", "se_gap")]
            rows.append(cells + (_about(models) if k == 0 else [""] * 9))
    rows = list(zip(*(column for column in zip(*rows, strict=True) if any(column[1:])), strict=True))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    scale = []
    for row in tables[0]["references"]:
        scale.append(f"{row['name']} {row['value']:.4f} {'nats' if row['unit'] == 'nats' else 'bits/dim'}")
    if (found := tables[0]["scale"]) is not None:
        scale += on_scale(Scale(**found | {"rows": {what: Measures(**row) for what, row in found["rows"].items()}}))
    seeds = f"{len(tables)} seed{'s' if len(tables) > 1 else ''}"
    first = f"{data['items']:,} items of the {data['split']} split, {seeds}. {'; '.join(scale)}."
    return "\n".join([first, "", *lines])


def _about(models: list[dict]) -> list[str]:
    """Fidelity, cost and size of one model of all seeds."""
    from genmodels.training.run import training_time

    fidelity, cost = [model["fidelity"] for model in models], [model["sampling"] for model in models]
    cells = [over_seeds(fidelity, key, f"{key}_error") for key, _ in MEASURES]
    cells += [f"{cost[0]['evaluations']:g}", mean_and_spread([one.get("samples_per_second") for one in cost], 0)]
    heads = [model["checkpoint"] for model in models]
    times = [training_time(Path(head["path"]).parent, "cpu_seconds") / 60 or None for head in heads]
    minutes = mean_and_spread(times, 1)
    return [*cells, f"{heads[0]['parameters']:,}", f"{heads[0]['step']:,}", minutes]


def marks(page: Path, name: str) -> tuple[str, str]:
    """What stands before and after a table in the page."""
    before, after = f"<!-- table {name} -->\n", f"\n<!-- end of {name} -->"
    if not page.is_file():
        raise SystemExit(f"{page} does not exist")
    text = page.read_text()
    if before not in text or after not in text:
        raise SystemExit(f"{page} has no lines {before.strip()} and {after.strip()}")
    return before, after


def fill(page: Path, out: Path, sets: list[str]) -> None:
    """Put the tables of these sets between their marks in the page; its words stay."""
    for name in sets:
        files = sorted((out / name).glob("table-*/table.json"))
        tables = [table for table in map(json.loads, map(Path.read_text, files))
                  if len(table["models"]) == len(RUNS[name])]
        if not tables:
            continue
        before, after = marks(page, name)
        text = page.read_text()
        head, tail = text.index(before) + len(before), text.index(after)
        page.write_text(text[:head] + as_markdown(tables, list(RUNS[name])) + text[tail:])


def main() -> None:
    """Train, evaluate, and fill the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="*", default=["digits", "8gaussians"], choices=list(RUNS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--root", help="folder of downloaded data")
    parser.add_argument("--given", nargs="*", default=[], help="model=run folder, trained before")
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--page", type=Path, help="a page with marks, as docs/results_small.md")
    given = parser.parse_args()
    for pair in given.given:
        model, _, folder = pair.partition("=")
        if not any(model in RUNS[name] for name in given.sets):
            parser.error(f"--given {pair}: give model=folder, the model one of "
                         + ", ".join(dict.fromkeys(model for name in given.sets for model in RUNS[name])))
        if not (Path(folder) / "best.ckpt").is_file():
            parser.error(f"--given {pair}: {folder or 'the folder'} holds no best.ckpt")
    if given.given and len(given.seeds) > 1:
        parser.error("--given names runs of one seed: give one of --seeds")
    for name in given.sets if given.page is not None else ():
        marks(given.page, name)
    import torch

    torch.set_num_threads(given.threads)
    for name in given.sets:
        make(name, given.seeds, given)
    if given.page is not None:
        fill(given.page, given.out, given.sets)


if __name__ == "__main__":
    main()
