"""Samples in batches, and by several processes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, NotFinite, RunError
from genmodels.core.processes import Ranks
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import Samples, SamplingOptions
from genmodels.data.transport import Transport
from genmodels.evaluation.features import Cache
from genmodels.evaluation.samples import Drawing, draw, draw_together, sounds_by_class, takes_temperature, write_folder
from genmodels.models.ddpm import DDPM
from genmodels.models.energy import EnergyModel
from genmodels.models.flow_matching import FlowMatchingModel
from genmodels.models.normalizing_flows import Glow, RealNVP
from genmodels.models.score import ScoreModel
from tests.two_processes import fork, in_two

SPEC = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)


DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
COUNTS = DataSpec("counts", (3,), levels=300)
PLANE = DataSpec("plane", (2,))
SMALL = {"channels": 8, "multipliers": [1], "blocks": 1}
MODELS = {
    "ddpm": (lambda: DDPM(DIGITS, net=SMALL, num_steps=10), {"steps": 3, "path": 2}),
    "ddpm of points": (lambda: DDPM(PLANE, net={"hidden": 8, "depth": 1}, num_steps=10), {"steps": 3}),
    "glow": (lambda: Glow(DIGITS, steps=1, hidden=8), {}),
    "realnvp of counts": (lambda: RealNVP(COUNTS, hidden=8), {}),
    "realnvp of points": (lambda: RealNVP(PLANE, hidden=8), {}),
    "energy of counts": (lambda: EnergyModel(COUNTS, net={"hidden": [8]}), {"sampler": "ula", "steps": 4}),
    "score": (lambda: ScoreModel(DIGITS, net=SMALL), {"steps": 3, "path": 2}),
}


def made(name):
    model, options = MODELS[name]
    model, generator = model(), torch.Generator().manual_seed(0)
    shape = (32, *model.spec.event_shape)
    levels = model.spec.levels
    x = torch.randn(shape, generator=generator) if levels is None else torch.randint(levels, shape, generator=generator)
    model.initialize(Batch(x, torch.arange(32) % 10, index=torch.arange(32)))
    return model.eval(), options


def test_a_flow_that_starts_from_data_has_no_temperature():
    model = FlowMatchingModel(Transport(source="moons", target="banana").prepare().spec, net={"hidden": 8, "depth": 1})
    assert not takes_temperature(model, None)


@pytest.mark.parametrize("name, sampler, expected", [
    ("ddpm", None, True), ("glow", None, True), ("score", None, True), ("score", "heun", True),
    ("score", "annealed_langevin", False), ("score", "predictor_corrector", False),
    ("energy of counts", None, False), ("energy of counts", "ula", False),
])  # fmt: skip
def test_a_temperature_is_taken_by_the_samplers_that_scale_their_noise(name, sampler, expected):
    model, _ = made(name)
    assert takes_temperature(model, sampler) is expected
    options = SamplingOptions(n=1, temperature=0.5, sampler=sampler, **({"steps": 3} if model.takes("steps") else {}))
    try:
        draw(model, options, progress=False)
        drawn = True
    except ValueError as error:
        drawn = "temperature=0.5 is a factor on the noise" not in str(error)
    assert drawn is expected


@pytest.mark.parametrize("temperature", [math.nan, math.inf, 1e30, -1.0, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_temperature_is_a_finite_number(name, temperature):
    model, options = made(name)
    with pytest.raises(InputError, match="temperature must be a finite number"):
        draw(model, SamplingOptions(n=2, temperature=temperature, **options), progress=False)


@pytest.mark.parametrize("name", MODELS)
def test_samples_that_are_not_finite_are_never_cast_to_integers(name):
    model, options = made(name)
    draw(made(name)[0], SamplingOptions(n=5, weights="raw", **options), batch_size=2, progress=False)
    weight = max(model.core.parameters(), key=torch.Tensor.numel)
    with torch.no_grad():
        weight.fill_(math.nan)
    with pytest.raises(RunError, match="^sample 3 is not finite|^chain 0 (starts where|diverged)"):
        draw(model, SamplingOptions(n=5, start=3, weights="raw", **options), batch_size=2, progress=False)


def test_the_sample_that_is_not_finite_is_named():
    """Of several batches it is the number within all of them, not the row of its own."""
    model, _ = made("ddpm")
    decode = model.decode

    def spoilt(x):
        x = x.clone()
        x[spoilt.row, 0, 1, 1] = math.inf
        spoilt.row = 1
        return decode(x)

    spoilt.row = slice(0, 0)
    model.decode = spoilt
    with pytest.raises(NotFinite, match="^sample 14 is not finite") as caught:
        draw(model, SamplingOptions(n=6, start=10, steps=2), batch_size=3, progress=False)
    assert caught.value.row == 1


def test_the_report_says_how_much_mass_lies_outside():
    from genmodels.core.data import Batch, DataSpec
    from genmodels.evaluation.sample_quality import share_outside
    from genmodels.evaluation.samples import draw
    from genmodels.models.energy import EnergyModel
    from genmodels.models.normalizing_flows import RealNVP

    spec = DataSpec("pixels", (1, 4, 4), levels=16)
    for model in (RealNVP(spec, hidden=4, depth=1), EnergyModel(spec, net={"channels": [8, 8]})):
        if isinstance(model, RealNVP):
            batch = Batch(torch.randint(16, (32, 1, 4, 4), generator=torch.Generator().manual_seed(0)),
                          index=torch.arange(32))
            model.initialize(batch)
        options = {} if isinstance(model, RealNVP) else {"steps": 2}
        samples = draw(model, SamplingOptions(n=6, weights="raw", **options), batch_size=4, progress=False)
        assert samples.outside.shape == (6,) and share_outside(samples.outside)["n"] == 6
        alone = draw(model, SamplingOptions(start=5, weights="raw", **options), progress=False)
        assert torch.equal(alone.outside, samples.outside[5:])


class Recorded:
    """A model whose sample k is k of the seed; it says which it was asked for."""

    family, device = "recorded", torch.device("cpu")

    def __init__(self):
        self.asked = []

    def takes(self, key: str) -> bool:
        return key in ("n", "seed", "start", "weights")

    def own_options(self) -> list[str]:
        return ["seed"]

    def require_options(self, given) -> None:
        assert all(map(self.takes, given))

    def sample(self, n, seed=0, start=0, weights="ema"):
        index = torch.arange(start, start + n)
        self.asked += index.tolist()
        x = KeyedGenerator(seed, index, "samples").uniform((n, 1, 4, 4)).mul(8).to(torch.uint8)
        return Samples(x, None, index, {"seed": seed, "weights": weights})


def drawing(ranks: Ranks, seed: int = 3) -> Drawing:
    options = SamplingOptions(n=11, start=2, seed=seed)
    return Drawing(Recorded(), options, 2, {"checkpoint": "abc"}, ranks)


def together(ranks: Ranks, seed: int = 3):
    own = drawing(ranks, seed)
    if ranks.rank:
        ranks.serve()
        return own.model.asked
    samples = draw_together(own, Cache(None))
    return {"x": samples.x, "index": samples.index, "asked": own.model.asked, "made": samples.made}


def folder(ranks: Ranks, target: Path, seed: int = 3):
    own = drawing(ranks, seed)
    if ranks.rank:
        ranks.serve()
        return own.model.asked
    lines = write_folder(own, DataSpec("squares", (1, 4, 4), levels=8), target)[1]
    return own.model.asked, lines


@fork
def test_samples_of_two_processes_are_those_of_one(tmp_path):
    one = together(Ranks())
    two, others = in_two(tmp_path / "two", together)
    assert torch.equal(one["x"], two["x"]) and one["index"].tolist() == two["index"].tolist() == list(range(2, 13))
    assert sorted(two["asked"] + others) == list(range(2, 13)) and len(others) == 5 and one["made"] == two["made"]
    # A mutant: noise of another seed in the second process.
    wrong, _ = in_two(tmp_path / "wrong", lambda ranks: together(ranks, 3 + ranks.rank))
    assert not torch.equal(one["x"], wrong["x"])


@fork
def test_single_files_of_two_processes_are_those_of_one(tmp_path):
    folder(Ranks(), tmp_path / "a")
    in_two(tmp_path / "two", folder, tmp_path / "b")
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == [f"{k:06d}.png" for k in range(2, 13)]
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    # Only what is missing is drawn again, and all of it with another seed.
    (tmp_path / "b" / "000007.png").unlink()
    asked, lines = folder(Ranks(), tmp_path / "b")
    assert asked == [6, 7] and "of which 9 were there" in lines[0]
    assert folder(Ranks(), tmp_path / "b", seed=4)[0] == list(range(2, 13))
    assert folder(Ranks(), tmp_path / "b", seed=4)[0] == []


def test_the_first_sample_of_each_class_is_heard(monkeypatch):
    monkeypatch.setattr("genmodels.speech.vocoder.GriffinLim", lambda config: Reversed(config))
    floor = float(torch.tensor(1e-5).log())
    x = torch.full((5, 3, 6), floor)
    for k in range(5):
        x[k, :, : k + 2] = -0.1 * k
    x[3] = torch.nan
    spec = DataSpec("spoken_digits", (3, 6), mel={"sample_rate": 8000, "hop": 2, "n_fft": 16, "n_mels": 3,
                                                  "f_max": 4000.0}, num_classes=4)
    found = sounds_by_class(x, torch.tensor([2, 0, 2, 1, 3]), spec)
    assert {key: len(wave) for key, wave in found.items()} == {"sound_1": 3, "sound_3": 0, "sound_0": 2, "sound_4": 6}
    assert set(sounds_by_class(x, None, spec)) == {"sound_0", "sound_1", "sound_2"}


class Reversed:
    """A vocoder of one sample for each frame."""

    def __init__(self, config):
        self.config = config

    def __call__(self, mel):
        return mel[0].flip(0)
