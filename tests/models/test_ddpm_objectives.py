"""The options of training a DDPM: what fits together, what is refused and why, and that runs continue exactly."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.cli.compose import composer
from genmodels.cli.main import main
from genmodels.core.data import Batch, DataSpec
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import LearnedSchedule, LossAwareTimes
from genmodels.models.base import GenerativeModel
from genmodels.models.build import build
from genmodels.models.checkpoint import read_checkpoint
from genmodels.models.ddpm import DDPM
from genmodels.speech.text import CHARACTERS
from tests.parameters import scattered

SMALL = {"channels": 8, "multipliers": [1, 2], "blocks": 1}
DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
PLANE = DataSpec("plane", (2,), levels=None)

OPTIONS = {
    "bound": {"objective": "vlb"},
    "bound, learned variance": {"objective": "vlb", "variance": "learned"},
    "hybrid": {"objective": "hybrid", "variance": "learned", "weighting": "min_snr"},
    "continuous": {"objective": "continuous"},
    "learned schedule": {"objective": "continuous", "schedule": "learned"},
    "learned schedule, bound": {"objective": "vlb", "schedule": "learned", "variance": "learned"},
    "ends": {"schedule": "linear_log_snr", "log_snr_ends": [7, -10], "objective": "hybrid", "variance": "learned"},
    "edm": {"parameterisation": "edm", "weighting": "edm"},
    "zero terminal": {"zero_terminal_snr": True, "weighting": "p2"},
    "a table without signal at its end": {"schedule": "linear", "zero_terminal_snr": True, "num_steps": 30},
    "self-conditioning": {"self_conditioning": True, "weighting": "sigmoid"},
    "all at once": {
        "objective": "hybrid", "variance": "learned", "self_conditioning": True, "time_sampler": "loss_aware",
        "zero_terminal_snr": True, "parameterisation": "x0",
    },
}  # fmt: skip


def model(spec=DIGITS, **options):
    torch.manual_seed(0)
    options = ({"net": SMALL} if spec.is_image else {"net": {"hidden": 16, "depth": 1}}) | options
    made = DDPM(spec, **({"num_steps": 12, "ema_decay": 0.0} | options))
    scattered(made.core.net, 0.05)
    return made


def batch(spec=DIGITS, n=6):
    generator = torch.Generator().manual_seed(1)
    if spec.levels is None:
        return Batch(torch.randn(n, *spec.event_shape, generator=generator), index=torch.arange(n))
    x = torch.randint(0, spec.levels, (n, *spec.event_shape), generator=generator).to(torch.uint8)
    return Batch(x, torch.arange(n) % 10, index=torch.arange(n))


@pytest.mark.parametrize("spec", [DIGITS, PLANE], ids=["image", "vector"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_trains_judges_and_samples(name, spec):
    made, items = model(spec, **OPTIONS[name]), batch(spec)
    loss = made.loss(items, KeyedGenerator(0, torch.arange(len(items)), "train"))
    loss.value.backward()
    unused = [n for n, p in made.core.named_parameters() if p.grad is None]
    assert loss.per_example.shape == (6,) and math.isfinite(float(loss.value.detach())) and not unused
    made.eval()
    for bound in ("discrete", "continuous"):
        found = made.log_likelihood(items, bound=bound, draws=2)
        assert found.kind == "lower_bound" and bool(found.nats.isfinite().all()) and found.stderr.shape == (6,)
        torch.testing.assert_close(-sum(found.parts.values()), found.nats)  # at scale 1 continuous data have no volume
        assert (found.profile.edges.diff() < 0).all()
    for sampler in ("ddpm", "dpmpp_2m"):
        assert made.sample(2, sampler=sampler, steps=4).x.shape == (2, *spec.event_shape)


def test_the_bounds_in_discrete_and_continuous_time_meet():
    """With two thousand steps they differ by less than the noise; both are in the data's own units."""
    made, items = model(num_steps=2000), batch(n=20)
    discrete = made.log_likelihood(items, draws=50)
    continuous = made.log_likelihood(items, bound="continuous", draws=50)
    gap = discrete.nats - continuous.nats
    assert abs(float(gap.mean())) < 4 * float(gap.std()) / math.sqrt(20)
    assert "continuous" in continuous.made["estimate"] and continuous.made["draws"] == 50


def test_bounds_train_in_bits_per_dimension():
    for objective in ("vlb", "continuous"):
        made, items = model(objective=objective), batch()
        loss = made.loss(items, KeyedGenerator(0, torch.arange(6), "train"))
        torch.testing.assert_close(loss.per_example, sum(loss.parts.values()) / (64 * math.log(2)))
        torch.testing.assert_close(loss.value, loss.per_example.mean())


def test_the_bound_of_a_learned_schedule_starts_where_levels_become_certain():
    made = model(schedule="learned", objective="continuous")
    assert made.core.schedule.end_points == pytest.approx((2 * math.log(32), -15.0))
    assert float(made.elbo.times(made.core.schedule)[0]) == 0 and len(made.elbo.times(made.core.schedule)) == 12


@pytest.mark.parametrize("schedule", ["cosine", "linear_log_snr", "learned"])
def test_the_ends_of_a_schedule_can_be_chosen(schedule):
    made = model(schedule=schedule, log_snr_ends=[6.5, -9], objective="continuous")
    times = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert made.core.schedule.log_snr(times).tolist() == pytest.approx([6.5, -9])
    assert float(made.elbo.times(made.core.schedule)[0]) == 0  # less noise than that tells of no further level


@pytest.mark.parametrize("levels", [2, 17, 256])
def test_a_perfect_denoiser_of_integers_pays_little_in_the_last_step(levels):
    """With the schedule's own end it would pay for the noise that is left there: the mutant."""

    def paid(**ends) -> float:
        """Bits for each scalar, from the cleanest level, of a decoder that is centred at the data."""
        spec = DataSpec("digits", (1, 2, 2), levels=levels)
        made = DDPM(spec, net={"channels": 8, "multipliers": [1], "blocks": 1}, schedule="linear_log_snr", **ends)
        scale = math.exp(-made.elbo.first_log_snr(made.core.schedule) / 2)
        k = torch.arange(levels)
        x = 2.0 * k / (levels - 1) - 1
        return -float(made.decoder.log_mass(k, x, torch.tensor(scale)).mean()) / math.log(2)

    assert paid() < 0.07
    if levels == 256:
        assert paid(log_snr_ends=[10.0, -10.0]) > 1


@pytest.mark.parametrize(
    "schedule", ["cosine", "linear_continuous", "grad_tts", "sigmoid", "linear_log_snr", "learned"]
)
@pytest.mark.parametrize("zero_terminal_snr", [False, True])
def test_the_steps_of_the_bound_are_even_in_log_snr(schedule, zero_terminal_snr):
    made = model(schedule=schedule, zero_terminal_snr=zero_terminal_snr, objective="continuous", num_steps=200)
    times, drawn = made.elbo.times(made.core.schedule), made.elbo.steps(made.core.schedule)
    steps = made.core.schedule.log_snr(times)[:-1].diff().detach()
    assert bool((times.diff() > 0).all()) and float(steps.min()) == pytest.approx(float(steps.max()), rel=1e-3)
    assert len(times) == len(drawn) == 200 and torch.equal(times[[0, -1]], drawn[[0, -1]])


def test_the_steps_of_a_table_are_its_own():
    made = model(schedule="linear", num_steps=200)
    assert torch.allclose(made.elbo.times(made.core.schedule) * 200, torch.arange(1, 201, dtype=torch.float64))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"objective": "hybrid", "variance": "beta"}, "choose variance = learned"),
        ({"variance": "learned"}, "objective=simple trains no variance: choose hybrid or vlb"),
        ({"objective": "continuous", "variance": "learned"}, "objective=continuous trains no variance"),
        ({"objective": "vlb", "weighting": "min_snr"}, "weighting=min_snr is for objective=simple and hybrid"),
        ({"schedule": "learned"}, "a learned schedule needs the ELBO"),
        ({"parameterisation": "eps", "zero_terminal_snr": True}, "eps carries no signal at SNR 0: choose v or x0"),
        ({"parameterisation": "eps", "schedule": "sigmoid"}, "eps carries no signal at SNR 0"),
        ({"schedule": "linear", "num_steps": 30, "log_snr_ends": [7, -10]}, "log_snr_ends is for schedule=cosine"),
        ({"log_snr_ends": [7.0]}, "two log-SNRs"),
        ({"log_snr_ends": [-7, 3]}, "must be greater"),
        ({"time_sampler": "often"}, "loss_aware"),
        ({"schedule": "linear_logsnr"}, "schedule must be one of"),
        ({"parameterisation": "epsilon"}, "parameterisation must be one of eps, x0, v, edm"),
        ({"objective": "elbo"}, "objective must be one of simple"),
        ({"variance": "fixed"}, "variance must be one of beta"),
        ({"decoder": "softmax"}, "decoder must be one of gaussian"),
        ({"noise": 0.5}, "noise=0.5 is for mels"),
    ],
)
def test_what_does_not_fit_together_is_refused(options, said, refuses):
    refuses(ValueError, said, model, **options)


def test_a_network_without_room_for_the_variance_is_refused():
    from genmodels.nn import UNet

    made = model(objective="hybrid", variance="learned", net=UNet((1, 8, 8), 10, **SMALL))
    with pytest.raises(ValueError, match="twice the channels"):
        made.loss(batch(), KeyedGenerator(0, torch.arange(6), "train"))


# ---- presets ----


TEXTS = DataSpec("speech", (8, 40), mel={}, statistics={"mean": -5.0, "std": 2.0}, text={
    "symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": ["a cab"]})  # fmt: skip
PRESETS = {
    "digits": ("ddpm", DIGITS, ["model.net.channels=8"]),
    "toy": ("ddpm", PLANE, ["model.net.hidden=16"]),
    "arrays": ("ddpm", PLANE, ["data.file=x.npz"]),
    "speech": ("mel_ddpm", TEXTS, ["model.net.channels=8", "model.encoder.channels=8", "model.encoder.hidden=8"]),
}


@pytest.mark.parametrize("data", PRESETS)
@pytest.mark.parametrize("objective", ["simple", "vlb", "hybrid", "continuous"])
def test_every_objective_goes_with_every_preset(data, objective):
    """Nobody who asks for an objective has to know which variances it can train."""
    family, spec, words = PRESETS[data]
    with composer("train") as hydra:
        config = hydra.compose([f"model={family}", f"data={data}", f"model.objective={objective}", *words])
    made = build(config["model"], spec)
    assert made.variance == ("learned" if objective == "hybrid" else "beta_tilde" if spec.levels else "beta")
    if family == "ddpm":
        made.initialize(batch(spec))
        assert made.loss(batch(spec), KeyedGenerator(0, torch.arange(6), "train")).value.isfinite().all()


# ---- the history of a loss-aware sampler ----


def drawn(made, ranks, monkeypatch):
    """What the sampler has learnt after one step of each rank's rows, gathered as several processes would."""
    items, parts = batch(n=8), []
    monkeypatch.setattr(GenerativeModel, "on_before_optimizer_step", lambda self, optimizer: None)
    for rank in range(ranks):
        rows = torch.arange(rank, 8, ranks)
        monkeypatch.setattr("genmodels.models.diffusion.rank_world", lambda rank=rank: (rank, ranks))
        made.loss(items.rows(rows), KeyedGenerator(0, rows, "train", 3))
        parts.append(made.time_sampler.pending.pop())
    monkeypatch.setattr(DDPM, "all_gather", lambda self, value: torch.stack(parts) if ranks > 1 else value,
                        raising=False)  # Lightning's, of the class that is made where it is imported
    made.time_sampler.pending.append(parts[-1])
    made.on_before_optimizer_step(None)
    assert not made.time_sampler.pending
    return made.time_sampler


def test_the_history_is_the_same_over_processes(monkeypatch):
    alone, spread = (drawn(model(time_sampler="loss_aware"), ranks, monkeypatch) for ranks in (1, 4))
    assert int(alone.seen.sum()) == 8 and torch.equal(alone.seen, spread.seen)
    torch.testing.assert_close(alone.losses, spread.losses, rtol=1e-5, atol=1e-7)


def test_judging_teaches_the_sampler_nothing():
    made = model(time_sampler="loss_aware")
    made.log_likelihood(batch())
    with torch.no_grad():  # as the search for a layer that is not finite does
        made.loss(batch(), KeyedGenerator(0, torch.arange(6), "train"))
    assert not made.time_sampler.pending and int(made.time_sampler.seen.sum()) == 0


TRAIN = [
    "train", "model=ddpm", "data=digits", "model.net.channels=8", "model.num_steps=20", "logger=csv",
    "trainer.progress=false", "trainer.sample_every_n_steps=0", "trainer.limit_validation=1", "data.batch_size=32",
    "model.schedule=learned", "model.objective=continuous", "model.time_sampler=loss_aware",
    "model.variance=beta_tilde", "model.self_conditioning=true", "model.optimizer.decay=none",
]  # fmt: skip


def trained(folder, *words):
    assert main([*TRAIN, f"run_dir={folder}", *words]) == 0
    return read_checkpoint(folder / "last.ckpt")["state_dict"]


@pytest.mark.slow
def test_a_run_with_state_in_every_part_resumes_exactly(tmp_path, monkeypatch):
    """25 + 25 steps are 50: soon every bin has its ten losses and the times are no longer uniform."""
    few = LossAwareTimes.__init__
    monkeypatch.setattr(LossAwareTimes, "__init__", lambda self: few(self, bins=10, history=10))
    whole = trained(tmp_path / "whole", "trainer.max_steps=50")
    trained(tmp_path / "parts", "trainer.max_steps=25")
    parts = trained(tmp_path / "parts", "trainer.max_steps=50", "resume=last")
    assert whole.keys() == parts.keys() and int(whole["time_sampler.seen"].min()) > 10
    for name, value in whole.items():
        assert torch.equal(value, parts[name]), name
    fresh = LearnedSchedule(log_snr_max=2 * math.log(32), log_snr_min=-15.0)
    assert not torch.equal(whole["core.schedule.heights"], fresh.heights)
