"""Dashboards: runs of all families log under the names of docs/dashboards.md, to W&B offline and TensorBoard."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from genmodels.cli.main import main
from genmodels.core.data import Batch, DataSpec
from genmodels.core.likelihood import Likelihood, Profile
from genmodels.models.ddpm import DDPM
from genmodels.models.energy import EnergyModel
from genmodels.training import dashboards
from genmodels.training.dashboards import LossProfile, Throughput, density_of, forward_flops, picture_of_profile
from tests.two_processes import fork, forked, joined

DOCUMENT = Path(__file__).parents[2] / "docs" / "dashboards.md"
FLOWS = {"nsf", "realnvp", "glow"}
STEPS = ["data=toy", "trainer=smoke", "trainer.max_steps=5", "trainer.validate_every_n_steps=2", "logger=tensorboard",
         "trainer.sample_every_n_steps=4", "trainer.log_every_n_steps=1", "trainer.progress=false", "data.n_train=200",
         "data.n_val=100", "data.n_test=100"]  # fmt: skip
RUNS = {
    "ddpm": ["model=ddpm", "model.objective=vlb", "model.num_steps=20", "model.net.hidden=16"],
    "nsf": ["model=nsf", "model.hidden=16"],
    "energy": ["model=energy", "model.net.hidden=[16,16]"],
    "score": ["model=score", "model.net.hidden=16"],
}


def documented() -> dict[str, set[str]]:
    """Names of the table in the document with the families that have them."""
    found = {}
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("| `"):
            names, _, families = (cell.strip() for cell in line.strip("|").split("|"))
            words = set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", families)))
            whose = words | (FLOWS if "flows" in words else set()) | (set(RUNS) if "all" in words else set())
            quoted = re.findall(r"`(.*?)`", names)
            group = quoted[0].rsplit("/", 1)[0]
            found |= {name if "/" in name else f"{group}/{name}": whose for name in quoted}
    return found


def pattern(name: str) -> str:
    return re.escape(name).replace("<split>", r"test").replace("<unit>", r"\w+").replace("<kind>", r"[\w, =]+").replace(
        "k_of_n", r"\d+_of_\d+")  # fmt: skip


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    """A family, what its short run left in W&B's records, and in TensorBoard's."""
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from tests.test_run import offline_records

    folder, before = tmp_path_factory.mktemp(request.param), Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            code = main(["train", *RUNS[request.param], *STEPS, "run_dir=run"])
    finally:
        os.chdir(before)
    assert code == 0, errors.getvalue()
    events = EventAccumulator(str(folder / "run" / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    history: dict[str, list] = {}
    for record in offline_records(folder / "run"):
        for item in record.history.item:
            history.setdefault(item.key or ".".join(item.nested_key), []).append(json.loads(item.value_json))
    return request.param, folder / "run", events, history


def names_in(history: dict) -> set[str]:
    """Names of metrics and pictures in W&B's history, without what it adds itself."""
    return {key.split(".")[0] for key in history if "/" in key and not key.startswith(("trainer/", "_"))}


def test_names_are_those_of_the_document(run):
    family, _, events, history = run
    shown = names_in(history)
    assert shown == {name for kind in ("scalars", "images") for name in events.Tags()[kind] if "/" in name}
    known = documented()
    for name in shown:
        assert any(re.fullmatch(pattern(one), name) and family in whose for one, whose in known.items()), name
    elsewhere = {"train/mse", "val/bits_per_dim"}  # of another objective, of integers
    for one, whose in known.items():
        if family in whose and not one.startswith("evaluation/") and one not in elsewhere:
            assert any(re.fullmatch(pattern(one), name) for name in shown), f"{one} is documented for {family}"


def test_both_loggers_hold_the_same_values_and_pictures(run):
    _, folder, events, history = run
    for name in filter(lambda name: "/" in name, events.Tags()["scalars"]):  # not Lightning's epoch, always the first
        written = [event.value for event in events.Scalars(name)]
        assert history[name] == pytest.approx(written, rel=1e-5, nan_ok=True), name
    for name in events.Tags()["images"]:
        kept = sorted((folder / name.split("/")[1]).glob("*.png"))
        assert len(events.Images(name)) == len(kept) == len(history[f"{name}.filenames"]) >= 1, name
        media = next((folder / "wandb").glob("offline-run-*")) / "files"
        assert all((media / file).is_file() for files in history[f"{name}.filenames"] for file in files)


def test_parts_of_the_bound_sum_to_it(run):
    family, folder, _, history = run
    if family != "ddpm":
        return
    noise = [history[name] for name in history if name.startswith("noise/")]
    assert [sum(each) for each in zip(*noise, strict=True)] == pytest.approx(history["val/diffusion"], rel=1e-4)
    parts = [sum(each) for each in zip(*(history[f"val/{p}"] for p in ("prior", "diffusion", "reconstruction")),
                                       strict=True)]  # fmt: skip
    volume = [nll - part for nll, part in zip(history["val/nll"], parts, strict=True)]
    assert volume[0] == pytest.approx(volume[1], abs=1e-3)  # the scale of the data, the same at every step


def test_the_document_has_a_small_picture():
    picture = DOCUMENT.with_suffix(".png")
    assert picture.name in DOCUMENT.read_text() and picture.stat().st_size < 200_000


def test_a_profile_is_drawn_with_its_area_whichever_way_its_edges_run():
    def drawn(edges, nats):
        profile = Profile(torch.tensor(edges), torch.tensor(nats, dtype=torch.float64), 2)
        return picture_of_profile(Likelihood(torch.zeros(2), "lower_bound", 3, 17, profile=profile)).tobytes()

    assert drawn([4.0, 1.0, -3.0], [2.0, 8.0]) == drawn([-3.0, 1.0, 4.0], [8.0, 2.0])
    assert drawn([4.0, 1.0, -3.0], [2.0, 8.0]) != drawn([4.0, 1.0, -3.0], [8.0, 2.0])


def test_a_score_model_has_the_density_of_its_ode_and_a_flow_its_own():
    from genmodels.models.normalizing_flows import NSF
    from genmodels.models.score import ScoreModel

    spec = DataSpec("toy_moons", (2,))
    score = ScoreModel(spec, net={"hidden": 16})
    points = Batch(torch.tensor([[0.0, 0.0]]), index=torch.arange(1))
    (of_the_middle,) = score.ode_likelihood(points, solver="heun", steps=8).nats
    assert density_of(score, [-1, 1, -1, 1], 3).item() == pytest.approx(float(of_the_middle), abs=1e-4)
    flow = NSF(spec, hidden=16)
    flow.initialize(Batch(torch.randn(200, 2, generator=torch.Generator().manual_seed(0))))
    found = density_of(flow.train(), [-9.0, 9.0, -9.0, 9.0], 128)
    assert flow.training and float(found.exp().sum()) * (18 / 128) ** 2 == pytest.approx(1, abs=0.02)
    assert math.isfinite(float(found.sum()))


CASES = {
    "inside": ([14.0, 13.6, 1.0, -0.1, -14.9], [1.0, 3.0, 5.0, 7.0, 11.0], 20),
    "beyond both ends": ([math.inf, 99.0, -99.0, -math.inf], [1.0, 2.0, 4.0, 8.0], 20),
    "on the edges": ([15.0, 0.0, -15.0], [1.0, 2.0, 4.0], 2),
    "one bin": ([3.0, -3.0, 0.0], [0.1, 0.2, 0.4], 1),
}


def brute_force(log_snr: list[float], losses: list[float], bins: int) -> dict[str, float]:
    """Figure by figure, with plain Python."""
    width, found = 30.0 / bins, {}
    for k in range(1, bins + 1):
        top, bottom = 15.0 - (k - 1) * width, 15.0 - k * width
        here = [
            loss for at, loss in zip(log_snr, losses, strict=True)
            if (at <= top or k == 1) and (at > bottom or k == bins)
        ]  # fmt: skip
        if here:
            mean = sum(here) / len(here)
            found[f"train_noise/{k}_of_{bins}"] = mean
            if len(here) > 1:
                found[f"train_noise_variance/{k}_of_{bins}"] = sum((x - mean) ** 2 for x in here) / len(here)
    return found


def forgetful(profile: LossProfile, log_snr, losses):
    """A mutant: within one call a bin keeps its last loss only, as indexed assignment does."""
    share = ((15.0 - log_snr.double()) / 30.0).clamp(0, 1)
    chosen = (share * profile.bins).long().clamp(max=profile.bins - 1)
    profile.sums[:, chosen] += torch.stack([torch.ones_like(losses), losses, losses.square()]).double()


@pytest.mark.parametrize("case", CASES)
def test_figures_are_those_of_brute_force(case):
    log_snr, losses, bins = CASES[case]
    profile = LossProfile(bins)
    for part in (slice(0, 1), slice(1, None)):
        profile.add(torch.tensor(log_snr[part]), torch.tensor(losses[part], dtype=torch.float64))
    assert profile.figures() == pytest.approx(brute_force(log_snr, losses, bins), rel=1e-12, abs=1e-12)


def test_mutant_is_caught():
    log_snr, losses, bins = CASES["inside"]
    profile = LossProfile(bins)
    forgetful(profile, torch.tensor(log_snr), torch.tensor(losses, dtype=torch.float64))
    assert profile.figures() != pytest.approx(brute_force(log_snr, losses, bins), rel=1e-6)


def test_state_goes_on_where_it_stopped():
    log_snr, losses, bins = CASES["inside"]
    first, second = LossProfile(bins), LossProfile(bins)
    first.add(torch.tensor(log_snr[:2]), torch.tensor(losses[:2]))
    second.load_state_dict(first.state_dict())
    second.add(torch.tensor(log_snr[2:]), torch.tensor(losses[2:]))
    assert second.figures() == pytest.approx(brute_force(log_snr, losses, bins))


@fork
def test_every_process_resumes_its_own_sums(tmp_path):
    """And where a run of three processes goes on with two, the first has the sums of all."""
    log_snr, losses, bins = CASES["inside"]

    def one(rank: int) -> None:
        profile, same, fewer = (LossProfile(bins) for _ in range(3))
        with joined(tmp_path / "meet", rank):
            profile.add(torch.tensor(log_snr[rank::2]), torch.tensor(losses[rank::2]))
            state = profile.state_dict()
            same.load_state_dict(state)
            fewer.load_state_dict({"sums": torch.cat([state["sums"], torch.zeros(1, 3, bins)])})
        torch.save([each.sums for each in (profile, same, fewer)], tmp_path / f"{rank}.pt")

    forked(one, (0,), (1,))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for profile, same, _ in (first, second):
        assert torch.equal(profile, same)
    whole = LossProfile(bins)
    whole.add(torch.tensor(log_snr), torch.tensor(losses))
    torch.testing.assert_close(first[2], whole.sums)
    assert not second[2].any() and second[0].any()


OBJECTIVES = {
    "simple": [],
    "vlb": ["model.objective=vlb"],
    "continuous, learned schedule": ["model.objective=continuous", "model.schedule=learned"],
    "hybrid": ["model.objective=hybrid", "model.variance=learned"],
    "no signal at the end": ["model.zero_terminal_snr=true"],
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_logs_it_and_its_mean_is_the_mean_loss(objective, tmp_path, monkeypatch):
    """Over all bins the losses counted between two validations are those that the run logged step by step."""
    seen, figures = [], LossProfile.figures
    monkeypatch.setattr(LossProfile, "figures", lambda self, sums: seen.append(sums.cpu()) or figures(self, sums))
    words = ["model=ddpm", "data=toy", "trainer=smoke", "trainer.max_steps=6", "trainer.validate_every_n_steps=3",
             "trainer.log_every_n_steps=1", "trainer.progress=false", "trainer.sample_every_n_steps=0",
             "data.n_train=64", "data.n_val=32", "data.n_test=32", "data.batch_size=32", "model.net.hidden=8",
             "logger=csv", f"run_dir={tmp_path / 'run'}"]  # fmt: skip
    assert main(["train", *words, *OBJECTIVES[objective]]) == 0
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert len(losses) == 6 and len(seen) == 2
    for sums, three in zip(seen, (losses[:3], losses[3:]), strict=True):
        assert int(sums[0].sum()) == 96
        assert float(sums[1].sum()) / 96 == pytest.approx(sum(three) / 3, rel=1e-5)
    logged = [{k: float(v) for k, v in row.items() if k.startswith("train_noise") and v} for row in rows]
    logged = [row for row in logged if row]
    assert len(logged) == 2
    for row, sums in zip(logged, seen, strict=True):
        assert row == pytest.approx(figures(LossProfile(), sums), rel=1e-5, abs=1e-5)


# ---- the speed of training ----


def small() -> DDPM:
    return DDPM(DataSpec("plane", (2,)), net={"hidden": 8, "depth": 1, "frequencies": 0, "dropout": 0.5}, num_steps=10)


def points(n: int = 6) -> Batch:
    return Batch(torch.zeros(n, 2), index=torch.arange(n))


def test_the_operations_of_a_forward_pass():
    """Linear layers alone: 2 for every weight."""
    made = small()
    linear = [m for m in made.core.modules() if isinstance(m, torch.nn.Linear)]
    assert forward_flops(made, points()) == 2 * sum(m.weight.numel() for m in linear)
    assert made.training


def test_operations_of_a_loss_that_takes_derivatives_are_counted_too():
    made = EnergyModel(DataSpec("plane", (2,)), net={"hidden": [8]})
    layers = [m for m in made.core.modules() if isinstance(m, torch.nn.Linear)]
    assert forward_flops(made, points()) >= 2 * sum(m.weight.numel() for m in layers)


def contrastive() -> EnergyModel:
    """An energy whose loss moves its chains, a buffer."""
    made = EnergyModel(DataSpec("plane", (2,)), loss="contrastive")
    made.initialize(Batch(torch.randn(300, 2, generator=torch.Generator().manual_seed(0))))
    return made


@pytest.mark.parametrize("make", [lambda: small(), lambda: contrastive()], ids=["ddpm", "chains that go on"])
def test_counting_draws_nothing_and_learns_nothing(make):
    made = make()
    torch.manual_seed(0)
    before, state = torch.get_rng_state(), {key: value.clone() for key, value in made.state_dict().items()}
    forward_flops(made, Batch(torch.ones(6, 2), index=torch.arange(6)))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[key]) for key, value in made.state_dict().items())


def timed(monkeypatch, events: str, **trainer) -> Throughput:
    """One second for every step (s), after which a validation (v), a checkpoint (c) or a picture (p) takes ten."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(dashboards.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(dashboards, "forward_flops", lambda model, batch: 1e9)
    monkeypatch.setattr(dashboards, "_COUNTED_AT", 0)
    loader = SimpleNamespace(waited=0.0)
    around = SimpleNamespace(train_dataloader=loader, accumulate_grad_batches=1, world_size=2, global_step=0,
                             is_global_zero=True,
                             strategy=SimpleNamespace(root_device=torch.device("cpu")), **trainer)
    speed = Throughput(pictures_every=max(0, events.find("p")))
    for event in events:
        clock.now += 1.0 if event == "s" else 10.0
        if event == "s":
            loader.waited += 0.25
            around.global_step += 1
            speed.on_train_batch_start(around, None, points(), 0)
            speed.on_train_batch_end(around, None, None, points(), 0)
        elif event == "v":
            speed.on_validation_start(around, None)
        elif event == "c":
            speed.on_save_checkpoint(around, None, {})
    speed.trainer = around
    return speed


@pytest.mark.parametrize("events, steps", [
    ("sssss", 2), ("sssssvss", 3), ("sssssvcss", 3), ("sssscssss", 4), ("ssssspsssss", 6)
])  # fmt: skip
def test_whole_steps_alone_count(monkeypatch, events, steps):
    speed = timed(monkeypatch, events)
    assert (speed.items, speed.seconds, speed.waited) == (12 * steps, steps, 0.25 * steps)


def test_the_line(monkeypatch):
    speed = timed(monkeypatch, "sssss")
    assert speed.line(speed.trainer) == "speed:    12 items/s, 25.0 % of it waiting for data, 36 GFLOP/s"
    assert timed(monkeypatch, "ss").line(speed.trainer) is None
    for rate, written in ((12_345.6, "12,346"), (92.934, "92.93"), (0.05123, "0.05123")):
        fast = timed(monkeypatch, "sssss")
        fast.items = rate * fast.seconds
        assert fast.line(fast.trainer).startswith(f"speed:    {written} items/s, ")
    monkeypatch.setattr(dashboards, "peak_of", lambda device: 36e9)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    assert speed.line(speed.trainer).endswith("36 GFLOP/s (50.0 % of the bfloat16 peak of 2 x GPU)")


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA L4", 121e12), ("NVIDIA L40", 181e12), ("NVIDIA L40S", 362e12),
                                            ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H100 PCIe", 756e12),
                                            ("NVIDIA H100 80GB HBM3", 989e12), ("Tesla T4", None)])  # fmt: skip
def test_the_peak_is_that_of_the_card(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert dashboards.peak_of(torch.device("cuda")) == peak
