"""model=mel_energy: scores that are gradients of an energy, annealed Langevin around the text's mean, items alone."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from genmodels.core.errors import InputError
from genmodels.core.random import FrameKeyedGenerator, KeyedGenerator
from genmodels.diffusion import Denoiser, V, alpha_sigma
from genmodels.energy import Potential
from genmodels.models import mel_diffusion
from genmodels.models import mel_diffusion as mel_langevin
from genmodels.models.mel_diffusion import langevin_levels
from genmodels.models.mels import alone, even_lengths
from genmodels.models.text_to_mel import MelEnergy
from tests.models.test_text_to_mel_ddpm import bound_error, mean_of, worst_difference
from tests.models.texts import DIFFUSION, N_MELS, batch, diffusion, gaussian, parts_of_training, spec

model, known = partial(diffusion, MelEnergy), partial(gaussian, MelEnergy)


# ---- the scores are those of the energy ---------------------------------------------------------------------------


def points(found: MelEnergy):
    """Noisy mels of unequal length at several levels, the denoiser's context, and their mask."""
    generator = FrameKeyedGenerator(0, torch.arange(3), "points")
    mask = even_lengths(batch()).mask
    x, context = (generator.child(name).normal((3, N_MELS, 14), dtype=torch.float64) for name in ("x", "context"))
    return x * mask, torch.tensor([-3.0, 0.5, 4.0]).double(), context, mask


def score_error(found: MelEnergy) -> float:
    """Between the denoiser's score -eps/sigma and minus the gradient of the energy, relative."""
    denoiser = found.core.denoiser.double()
    x, log_snr, context, mask = points(found)
    _, sigma = alpha_sigma(log_snr)
    with torch.no_grad():
        score = -denoiser.at_log_snr(x, log_snr, context, mask).eps / sigma[:, None, None]
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(denoiser.net.energy(leaf, log_snr, context, mask).sum(), leaf)
    return float(((score + gradient) * mask).norm() / gradient.norm())


def test_the_score_is_minus_the_gradient_of_the_energy(monkeypatch):
    assert score_error(model()) < 1e-12
    # The noise level's factor squared is caught.
    right = Potential.energy

    def squared(self, x, log_snr, cond=None, mask=None):
        return right(self, x, 2 * log_snr, cond, mask) if log_snr.shape == (3,) else None

    monkeypatch.setattr(Potential, "energy", squared)
    assert score_error(model()) > 1e-2


def asymmetry(found: MelEnergy) -> float:
    """Of the Jacobian of the predicted noise of one item: zero for a gradient."""
    denoiser = found.core.denoiser.double()
    x, log_snr, context, _ = points(found)
    one, level, given = x[:1, :, :4], log_snr[1:2], context[:1, :, :4]
    jacobian = torch.autograd.functional.jacobian(lambda y: denoiser.at_log_snr(y, level, given).eps, one)
    square = jacobian.reshape(one.numel(), one.numel())
    return float((square - square.T).norm() / (square - square.diagonal().diag()).norm())


def test_the_field_is_a_gradient_and_that_of_a_free_network_is_not():
    found = model()
    assert asymmetry(found) < 1e-12
    found.core.denoiser = Denoiser(found.core.denoiser.net.network, found.core.schedule, V())
    assert asymmetry(found) > 0.1


def test_it_starts_as_a_standard_normal_density():
    torch.manual_seed(0)
    found = MelEnergy(spec(), **DIFFUSION)
    x, log_snr, context, mask = (value.float() if value.is_floating_point() else value for value in points(found))
    energy = found.core.denoiser.net.energy(x, log_snr, context, mask)
    assert torch.allclose(energy, 0.5 * x.square().sum((1, 2)))


def test_gradients_are_there_when_nobody_asks_for_any():
    found, data = model(), batch()
    outside = found.log_likelihood(data, draws=3).nats
    with torch.inference_mode():
        inside = found.log_likelihood(batch(), draws=3).nats
        drawn = found.sample(1, text="a cab", steps=10).x
    assert torch.allclose(outside, inside) and not inside.requires_grad and drawn.isfinite().all()


@pytest.mark.parametrize("name, value", [("spacing", "karras"), ("eta", 1.0), ("churn", 1.0), ("diffusion", "sine")])
def test_annealed_langevin_refuses_options_of_other_samplers(name, value):
    with pytest.raises(ValueError, match=f"{name} is an option of the other samplers, not of annealed_langevin"):
        model().sample(1, text="a cab", steps=10, **{name: value})


def test_energies_grow_away_from_the_mean_and_know_no_padding():
    found, data = model(), even_lengths(batch())
    together = found.energies(data)
    assert together.shape == (3,) and together.isfinite().all()
    for k in range(3):
        assert float(found.energies(alone(data, k))) == pytest.approx(float(together[k]), rel=1e-4)
    far = batch()
    far.x = far.x + 5.0
    assert (found.energies(far) > together).all()


# ---- training -----------------------------------------------------------------------------------------------------


def test_denoising_trains_every_parameter_and_lowers_the_loss():
    torch.manual_seed(0)
    found = MelEnergy(spec(), **DIFFUSION, ema_decay=0)
    first, last = parts_of_training(found)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in found.core.parameters())
    assert last["encoder_nll_per_dim"] < first["encoder_nll_per_dim"] - 0.1
    assert last["duration"] < 0.8 * first["duration"] and last["mse"] < first["mse"]


def test_each_item_has_its_own_loss():
    found, data = model(time_sampler="uniform"), batch()
    together = found.loss(data, KeyedGenerator(0, data.index, "train", 3)).per_example.detach()
    for k in range(3):
        one = found.loss(alone(data, k), KeyedGenerator(0, data.index[k : k + 1], "train", 3))
        assert float(one.per_example[0].detach()) == pytest.approx(float(together[k]), abs=1e-5)


# ---- likelihood ---------------------------------------------------------------------------------------------------


def test_the_bound_is_the_density_of_a_gaussian_around_the_mean():
    assert bound_error(known(0.7), 0.7) < 4
    assert bound_error(known(0.7), 0.35) > 10  # of another Gaussian it is not


def test_likelihood_in_a_batch_is_that_alone(monkeypatch):
    found = model()
    assert worst_difference(found, draws=4) < 1e-5
    monkeypatch.setattr(mel_diffusion, "FrameKeyedGenerator", KeyedGenerator)
    assert worst_difference(found, draws=4) > 1e-3


# ---- samples ------------------------------------------------------------------------------------------------------


def moments(found: MelEnergy, temperature: float = 1.0, **options) -> tuple[float, float, int]:
    """Mean and variance of what samples are beyond their mean, and how many numbers there are."""
    mean = mean_of(found, "a cab", [8] * 5)
    drawn = found.sample(64, text="a cab", durations=[[8] * 5], temperature=temperature, **options)
    rest = (drawn.x - mean) / found.units.scale
    return float(rest.mean()), float(rest.var()), rest.numel()


@pytest.mark.parametrize("steps, excess", [(50, 0.17), (200, 0.04)])
def test_annealed_langevin_draws_a_known_gaussian(steps, excess, monkeypatch):
    """Unadjusted steps leave a known excess of variance, which more levels bring down."""
    mean, variance, count = moments(known(0.5), steps=steps)
    assert abs(mean) < 5 * math.sqrt(0.5 / count)
    assert variance / 0.5 == pytest.approx(1 + excess, abs=0.04)
    # Scores of x taken for those of x/alpha are caught.
    monkeypatch.setattr("genmodels.models.score.alpha_sigma", lambda log_snr: (torch.ones_like(log_snr),) * 2)
    assert not moments(known(0.5), steps=steps)[1] / 0.5 < 1.3 + excess


def test_the_temperature_multiplies_all_noise():
    found, durations = known(0.5), [[3, 1, 2, 2, 3]]
    mean = mean_of(found, "a cab", durations[0])
    for sampler in ("annealed_langevin", "dpmpp_2m", "ddpm"):
        away = [found.sample(1, text="a cab", durations=durations, temperature=t, sampler=sampler, steps=10).x[0] - mean
                for t in (0.0, 0.5, 2.0)]  # fmt: skip
        assert float(away[0].abs().max()) < 1e-4
        assert torch.allclose(4 * away[1], away[2], atol=1e-3) and float(away[1].abs().max()) > 0.1


@pytest.mark.parametrize("schedule, first", [("grad_tts", 10.025), ("sigmoid", 12.0), ("cosine", 12.0)])
def test_langevin_starts_around_the_mean(schedule, first, monkeypatch):
    """At t = 1 a mel is N(m, temperature^2 I): in levels of sigma/alpha, N(m, temperature^2 exp(-log SNR))."""
    found, seen = model(schedule=schedule), {}
    levels = langevin_levels(found.core.schedule, 10)
    assert -2 * math.log(levels[0]) == pytest.approx(-first, abs=1e-3) and levels[-1] == pytest.approx(math.exp(-5))
    right = mel_langevin.annealed_langevin

    def at_the_start(network, shape, sigmas, generator, **options):
        nothing = options | {"steps_per_level": 0, "denoise": False}
        seen["start"] = right(network, shape, sigmas, generator, **nothing)
        return right(network, shape, sigmas, generator, **options)

    monkeypatch.setattr(mel_langevin, "annealed_langevin", at_the_start)
    drawn = found.sample(16, text="a cab", durations=[[8] * 5], temperature=0.5, steps=10).x
    assert float(seen["start"].var()) == pytest.approx(0.25 * levels[0] ** 2, rel=0.03) and drawn.isfinite().all()


def test_a_sample_is_the_same_alone_in_a_batch_and_later():
    found = model()
    texts = ["a cab", "bad dad said no", "ha"]
    together = found.sample(6, text=texts, seed=5, steps=10)
    assert together.made["evaluations"] == 21  # of one sample
    for k, text in enumerate(texts):
        one = found.sample(1, text=text, seed=5, steps=10)
        frames = int(one.mask.sum())
        assert int(together.mask[k].sum()) == frames
        assert torch.allclose(together.x[k, :, :frames], one.x[0], atol=1e-3)
        assert not torch.allclose(together.x[k, :, :frames], together.x[3 + k, :, :frames], atol=1e-2)
    later = found.sample(1, text=texts, seed=5, start=4, steps=10)
    assert torch.allclose(together.x[4, :, : int(later.mask.sum())], later.x[0, :, : int(later.mask.sum())], atol=1e-3)


def test_activations_cannot_be_recomputed():
    with pytest.raises(InputError, match="model.net.checkpointing is not for model=mel_energy"):
        model(net=DIFFUSION["net"] | {"checkpointing": True})


def test_speakers_by_name():
    found = model(("anna", "ben"))
    anna, ben = (found.sample(1, cond=name, text="a cab", temperature=0.0, durations=[[2] * 5], steps=10).x
                 for name in ("anna", "ben"))
    assert not torch.allclose(anna, ben, atol=1e-3)
    assert found.log_likelihood(batch(speaker=True), draws=3).nats.isfinite().all()


@pytest.mark.parametrize("wrong, reason", [
    ({"sampler": "rk4"}, "sampler"), ({"steps": 9}, "steps must be at least 10 noise levels"),
    ({"sampler": "ddim", "steps": 13}, "steps must lie in 1..12"),
    ({"eta": 0.5}, "eta is an option of the other samplers"),
    ({"temperature": -1.0}, "temperature"), ({"temperature": math.nan}, "temperature must be a finite number"),
    ({"seconds": 0.01}, "at least 7 frames"),
])  # fmt: skip
def test_what_cannot_be_sampled(wrong, reason):
    with pytest.raises(ValueError, match=reason):
        model().sample(1, text="bad dad", **wrong)
