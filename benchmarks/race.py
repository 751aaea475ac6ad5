"""Quality for equal compute, side by side with peers: the same data, batches and number of parameters, one thread each.

    pip install normflows nflows denoising-diffusion-pytorch diffusers torchcfm torchebm
    python benchmarks/race.py glow --seconds 900 --root ~/data --out runs/race [--items 1000] [--samples 1000]
    python benchmarks/race.py glow realnvp --out runs/race --picture race.png    # more races; those that are done stay
    python benchmarks/race.py score_matching --seconds 60 --root ~/uci --data winequality-white.csv

The contestants of a race take turns, each in a process of its own: to 25 % of the budget, to 50 %, to the end. The
budget is CPU seconds of training, a step of each counted with its median time (batch, noise, loss, backward, optimiser)
in rounds in which all of them do a step in turn, before the race: what else a machine does would otherwise favour some.
Those times are kept, for other machines too. After each turn the negative log-likelihood of test items is taken, and
the Frechet distance of as many samples as test items in our features. A race that was stopped goes on where it was.

Parameters must agree within 5 %. Our diffusion runs with the plain network, as in our preset (flow matching) and as for
likelihood; its peers run as in their example and at our rate (the same warm-up, decay and clipping).
Peers' flows run on pixels in [0, 1], as in their examples, and once on the logits that ours take.
Flows have Adam at 1e-3 throughout, those of RealNVP gradients of norm 1 at most, without which ours loses in a step
what it learned in minutes. A peer's flow gives log p(v) of v = (x + u)/256, u uniform, hence 8 - log2 p(v)/D bits/dim,
as ours does; before a race its density is compared with its base and autograd's determinant, on 4 x 4 pixels. A peer's
diffusion network is trained by its own loss and put in the place of ours, on its own schedule, for our bound and our
sampler.

Score matching runs on the white columns of a UCI table, split and filled as in uci_energy.py, with one network for all,
batches of 100 and Adam at 1e-3; in the place of bits/dim stands the exact score-matching loss of the test rows.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from contestants import RACES, SMALL, Contestant
from torch import nn
from uci_energy import read, split

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.core.files import write_text, write_whole
from genmodels.core.random import KeyedGenerator
from genmodels.data.vision import MNIST, FashionMNIST
from genmodels.evaluation.features import Cache, Items, network_for
from genmodels.evaluation.fidelity import frechet_with_error
from genmodels.evaluation.table import measured

DATA = {"mnist": MNIST, "fashion_mnist": FashionMNIST}
SHARES = (0.25, 0.5, 1.0)
FLOWS = ("glow", "realnvp")  # whose loss is in bits/dim


def density_error(build: Callable[[DataSpec], Contestant]) -> float:
    """The largest error in nats of a peer's log p(v): against its normal base and autograd's determinant, float64."""
    torch.manual_seed(0)
    contestant, v = build(SMALL), torch.rand(8, *SMALL.event_shape, dtype=torch.float64)
    contestant.model.double()
    contestant.density(v)  # data-dependent layers
    errors = []
    with torch.no_grad():
        for name, value in contestant.model.named_parameters():
            if not name.startswith("q0"):  # the bases stay normal
                value.add_(0.1 * torch.randn_like(value))
    for one in v[:3, None]:
        z, nats = contestant.density(one)
        jacobian = torch.func.jacrev(lambda x: contestant.density(x)[0].flatten())(one).reshape(SMALL.dims, SMALL.dims)
        base = -0.5 * z.square().sum() - SMALL.dims / 2 * math.log(2 * math.pi)
        errors.append(base + torch.linalg.slogdet(jacobian)[1] - nats)
    return float(torch.stack(errors).detach().abs().max())


def prepared(given: argparse.Namespace, size: int) -> tuple[DataSpec, Batch, Batch]:
    """What a race runs on: its description, training and test items."""
    if given.data in DATA:
        data = DATA[given.data](root=given.root, download=False, batch_size=size).prepare()
        return data.spec, *(next(iter(data.loader(name, 60_000))) for name in ("train", "test"))
    rows = split(read(Path(given.root) / given.data), given.seed, "training")
    train, test = (Batch(rows[name], None, index=torch.arange(len(rows[name]))) for name in ("train", "test"))
    return DataSpec("table", tuple(train.x.shape[1:])), train, test


def advance(contestant: Contestant, train: Batch, size: int, step: int, seed: int) -> float | None:
    """One step of training; its loss, or None where loss or gradient are not finite and the step is left out."""
    index = torch.arange(size) + step * size
    chosen = (KeyedGenerator(seed, index, "race").uniform((size,)) * len(train.x)).long()
    batch = train.rows(chosen)
    if step == 0:
        contestant.begin(batch)
    loss = contestant.loss(batch, KeyedGenerator(seed, index, "train", step))
    contestant.optimizer.zero_grad()
    finite = bool(torch.isfinite(loss))
    if finite:  # others are left out, as in the example of normflows
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in contestant.model.parameters() if p.grad is not None])
        finite = bool(torch.isfinite(norm))
    if finite:
        nn.utils.clip_grads_with_norm_(contestant.model.parameters(), contestant.clip, norm)
        contestant.optimizer.step()
    contestant.after(step)
    return float(loss.detach()) if finite else None


def step_seconds(given: argparse.Namespace, race: str) -> dict[str, float]:
    """The median CPU seconds of a step of each contestant that is installed, in rounds of a step of each."""
    file = given.out / f"{race}-steps.json"
    if file.exists():
        return json.loads(file.read_text())
    if any(given.out.glob(f"{race}-*.pt")):
        raise InputError(f"{given.out} has turns of {race}, but not the times of their steps: give another --out")
    torch.set_num_threads(1)
    size, contestants = RACES[race]
    spec, train, _ = prepared(given, size)
    built, times = {}, {}
    for name, build in contestants.items():
        try:
            built[name], times[name] = build(spec), []
        except ImportError:
            continue
    began, rounds = time.process_time(), 0
    while rounds < 10 or (rounds < 200 and time.process_time() - began < 20):
        for name, contestant in built.items():
            start = time.process_time()
            advance(contestant, train, size, rounds, given.seed)
            times[name].append(time.process_time() - start)
        rounds += 1
    found = {name: statistics.median(values[1:]) for name, values in times.items()}
    write_text(file, json.dumps(found))
    return found


def turn(given: argparse.Namespace, race: str, name: str, file: Path) -> None:
    """Train one contestant to its next mark and evaluate it there; `file` holds what is known of it."""
    torch.set_num_threads(1)
    size, contestants = RACES[race]
    seconds = step_seconds(given, race)[name]
    spec, train, test = prepared(given, size)
    state = torch.load(file.with_suffix(".pt"), weights_only=True) if file.exists() else None
    new = {"settings": settings(given), "curve": [], "marks": [], "skipped": 0}
    known = json.loads(state["known"]) if state else new
    step = len(known["curve"])
    if len(known["marks"]) == len(SHARES):  # killed between the two files
        write_text(file, state["known"])
        return
    torch.manual_seed(given.seed)
    contestant = contestants[name](spec)
    if state:
        contestant.model.load_state_dict(state["model"])
        contestant.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["noise"])
    rates = [group.setdefault("full", group["lr"]) for group in contestant.optimizer.param_groups]
    steps = [max(1, round(share * given.seconds / seconds)) for share in SHARES]
    while step < steps[len(known["marks"])]:
        for group, rate in zip(contestant.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, (step + 1) / contestant.warmup)
            if contestant.decay:
                group["lr"] *= 0.5 + 0.5 * math.cos(math.pi * step / steps[-1])
        loss = advance(contestant, train, size, step, given.seed)
        step += 1
        known["skipped"] += loss is None
        known["curve"].append([round(step * seconds, 3), loss])
    mark = {"seconds": step * seconds, "steps": step, **evaluated(contestant, spec, train, test, given)}
    known["marks"].append(mark)
    known["parameters"] = sum(p.numel() for group in contestant.optimizer.param_groups for p in group["params"])
    known["marks"][-1]["skipped"] = known["skipped"]
    state = {"model": contestant.model.state_dict(), "optimizer": contestant.optimizer.state_dict(),
             "noise": torch.get_rng_state(), "known": json.dumps(known)}  # fmt: skip
    write_whole(file.with_suffix(".pt"), lambda target: torch.save(state, target))
    write_text(file, state["known"])


def evaluated(contestant: Contestant, spec: DataSpec, train: Batch, test: Batch, given: argparse.Namespace) -> dict:
    """Bits/dim of the first test items, and the Frechet distance of as many samples as items, with standard errors."""
    parts = torch.arange(min(given.items, len(test.x))).split(250)
    values = torch.cat([contestant.bits(test.rows(part), given.terms) for part in parts]).double()
    likelihood = {"bits": float(values.mean()), "bits_se": float(values.std()) / math.sqrt(len(values)),
                  "items": len(values)}  # fmt: skip
    if contestant.draw is None:
        return likelihood
    cache = Cache(given.out / "features")
    features = network_for(Items(spec, train.x, test.x, train.cond, test.cond, spec.name, cache))
    drawn = torch.cat([contestant.draw(min(250, given.samples - k), k) for k in range(0, given.samples, 250)])
    distance = frechet_with_error(features(drawn), features(test.x[: given.samples]))
    return likelihood | {"frechet": distance.value, "frechet_se": distance.error, "samples": given.samples}


def run(given: argparse.Namespace, race: str) -> dict[str, dict]:
    """All turns that are not done, each in a process of its own; what is known of each contestant at the end."""
    found: dict[str, dict] = {}
    installed = step_seconds(given, race)
    if absent := [name for name in RACES[race][1] if name not in installed]:
        print(f"{race}: {', '.join(absent)} left out, not installed when the steps were timed", flush=True)
    for number in range(len(SHARES)):
        for name in installed:
            build = RACES[race][1][name]
            file = given.out / f"{race}-{name.replace(', ', '-').replace(' ', '-')}.json"
            before = json.loads(file.read_text()) if file.exists() else {"marks": [], "settings": settings(given)}
            if before["settings"] != settings(given):
                raise InputError(f"{file} is of another race, give another --out: {before['settings']}")
            marks = before["marks"]
            if not marks and name != "genmodels" and race in FLOWS:
                error = density_error(build)
                print(f"{race}: log p of {name} is wrong by {error:.1e} nats", flush=True)
                if not error < 1e-6:
                    raise InputError(f"{race}: log p of {name} is wrong, and its figures would be")
            try:
                if len(marks) <= number:
                    words = [f"--{key}={getattr(given, key)}" for key in KEPT]
                    command = [sys.executable, __file__, race, "--turn", name, "--file", str(file), *words]
                    subprocess.run(command, check=True)
            except subprocess.CalledProcessError as failed:
                if failed.returncode in (130, -signal.SIGINT):
                    raise KeyboardInterrupt from None
                raise SystemExit(f"{race}: {name} ended with exit code {failed.returncode}") from None
            found[name] = json.loads(file.read_text())
            sizes = [known["parameters"] for known in found.values()]
            if max(sizes) > 1.05 * min(sizes):
                raise InputError(f"{race}: the contestants have {min(sizes):,} to {max(sizes):,} parameters")
            print(row(race, name, found[name], number), flush=True)
    return found


def row(race: str, name: str, known: dict, number: int) -> str:
    """A line of the table, with standard errors."""
    mark = known["marks"][number]
    distance = measured(mark.get("frechet"), mark.get("frechet_se"))
    skipped = f", {mark['skipped']} of them skipped" if mark["skipped"] else ""
    bound = "" if race == "score_matching" else "<= "
    return (f"| {race} | {name} | {known['parameters']:,} | {mark['seconds']:.0f} | {mark['steps']:,}{skipped} | "
            f"{bound}{measured(mark['bits'], mark['bits_se'])} | {distance} |")


def scale(given: argparse.Namespace) -> str:
    """The Frechet distances of items that are no samples, at the same n."""
    data = DATA[given.data](root=given.root, download=False).prepare()
    train, val, test = (next(iter(data.loader(name, 60_000))) for name in ("train", "val", "test"))
    items = Items(data.spec, train.x, test.x, train.cond, test.cond, data.spec.name, Cache(given.out / "features"))
    features, n = network_for(items), given.samples
    noise = torch.randint(0, data.spec.levels, test.x[:n].shape, generator=torch.Generator().manual_seed(0)).to(test.x)
    others = {"other held-out items": val.x[:n], "noise": noise}
    found = [(frechet_with_error(features(x), features(test.x[:n])), name) for name, x in others.items()]
    distances = ", ".join(f"{measured(distance.value, distance.error)} of {name}" for distance, name in found)
    return f"Fréchet distances of n = {n} to as many test items: {distances}"


def picture(races: dict[str, dict[str, dict]], path: Path) -> None:
    """Bounds and Frechet distances at the marks; of flows, whose loss is a bound, that of training too."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(races), 2, figsize=(13, 4 * len(races)), squeeze=False, constrained_layout=True)
    for (left, right), (race, contestants) in zip(axes, races.items(), strict=True):
        for number, (name, known) in enumerate(contestants.items()):
            shown, marks = {"color": f"C{number}", "capsize": 3, "marker": "o", "label": name}, known["marks"]
            seconds = [mark["seconds"] for mark in marks]
            for axis, key in ((left, "bits"), (right, "frechet")):
                if key in marks[0]:
                    values, errors = ([mark[name] for mark in marks] for name in (key, f"{key}_se"))
                    axis.errorbar(seconds, values, errors, **shown)
            curve = [point for point in known["curve"] if point[1] is not None] if race in FLOWS else []
            smooth = [statistics.fmean(loss for _, loss in curve[k - 10 : k + 10]) for k in range(10, len(curve) - 9)]
            left.plot([when for when, _ in curve[10 : len(curve) - 9]], smooth, color=f"C{number}", alpha=0.4)
        unit = "exact score-matching loss" if race == "score_matching" else "test bound, bits/dim"
        left.set(title=race, xlabel="CPU seconds of training, one thread", ylabel=unit)
        right.set(xlabel="CPU seconds of training, one thread", ylabel="Fréchet distance", yscale="log")
        right.legend(*left.get_legend_handles_labels(), fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=100)


KEPT = ("seconds", "data", "root", "out", "items", "terms", "samples", "seed")  # passed on to each turn


def settings(given: argparse.Namespace) -> dict:
    """What a contestant's results depend on."""
    return {key: getattr(given, key) for key in KEPT if key not in ("root", "out")}


def main() -> None:
    """Run the races, or one turn of one contestant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("races", nargs="+", choices=list(RACES))
    parser.add_argument("--seconds", type=float, default=900.0, help="CPU seconds of training for each contestant")
    parser.add_argument("--data", default="mnist", help="mnist, fashion_mnist, or the file of a UCI table")
    parser.add_argument("--root", default="data", help="folder of the data")
    parser.add_argument("--out", type=Path, default=Path("runs/race"))
    parser.add_argument("--items", type=int, default=10_000, help="test items, the first ones")
    parser.add_argument("--terms", type=int, default=1, help="of the bound of diffusion, for each item")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.seconds > 0 or min(given.items, given.samples) < 2 or given.terms < 1:
        parser.error("--seconds must be positive, --items and --samples at least 2, --terms at least 1, got "
                     f"{given.seconds:g}, {given.items}, {given.samples} and {given.terms}")
    given.out.mkdir(parents=True, exist_ok=True)
    if given.turn is not None:
        turn(given, given.races[0], given.turn, given.file)
        return
    for race in given.races:
        if (race == "score_matching") == (given.data in DATA):
            parser.error(f"{race} does not run on --data {given.data}: score_matching takes the file of a table, "
                         f"others {' or '.join(DATA)}")
    found = {race: run(given, race) for race in given.races}
    print("| race | contestant | parameters | CPU seconds | steps | test bound, bits/dim | Fréchet distance |")
    print("|---" * 7 + "|")
    for race, contestants in found.items():
        for name, known in contestants.items():
            for number in range(len(known["marks"])):
                print(row(race, name, known, number))
    if given.data in DATA:
        print(scale(given))
    if given.picture is not None:
        picture(found, given.picture)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:  # of a turn too, whose parent says it
        if "--turn" not in sys.argv:
            print("stopped: the same command goes on with the turn that was stopped", flush=True)
        sys.exit(130)
