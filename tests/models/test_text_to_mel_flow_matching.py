"""model=mel_flow_matching, and what all models of mels around a text's mean do: the ODE, editing, infilling."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.models.mels import alone
from genmodels.models.text_to_mel import MelDDPM, MelEnergy, MelFlowMatching
from tests.models.test_text_to_mel_ddpm import bound_error, mean_of, worst_difference
from tests.models.texts import DIFFUSION, N_MELS, batch, diffusion, gaussian, parts_of_training, spec

FAMILIES = (MelFlowMatching, MelDDPM, MelEnergy)


def model(family=MelFlowMatching, **options):
    return diffusion(family, **options)


def test_the_bound_is_the_density_of_a_gaussian_around_the_mean():
    assert bound_error(gaussian(MelFlowMatching, 0.7), 0.7) < 4


@pytest.mark.parametrize("family", [MelFlowMatching, MelDDPM])
def test_the_ode_gives_the_density_of_a_gaussian_around_the_mean(family):
    found, data = gaussian(family, 0.7), alone(batch(), 2)
    estimate = found.ode_likelihood(data, alignment="best", solver="rk4", steps=40)
    assert estimate.kind == "ode" and "best alignment" in estimate.made["given"]
    one, noise = found.keyed(data, 0)
    u, volume = found.units(one, noise)
    mean = found.align(found.weights("ema"), u, one)
    rest = u.double() - mean.mu.double() @ mean.path.double()

    def error(variance: float) -> float:
        """The distance from the density of a Gaussian of that variance, nats per cell."""
        each = -0.5 * (rest.square() / variance + math.log(2 * math.pi * variance))
        return float((estimate.nats - each.sum() - volume).abs() / estimate.dims)

    assert error(0.7) < 2e-3 and error(0.75) > 5e-3


@pytest.mark.parametrize("family", [MelFlowMatching, MelEnergy])
def test_likelihoods_by_the_ode_do_not_depend_on_padding(family):
    found, data, ode = model(family), batch().rows(slice(1, 3)), {"solver": "heun", "steps": 2}
    together, each = found.ode_likelihood(data, **ode), found.ode_likelihood(alone(data, 1), **ode)
    assert torch.allclose(together.nats[1:], each.nats, rtol=1e-6)
    assert together.made["divergence"] == "hutchinson"  # however short the mel
    best = found.ode_likelihood(alone(data, 1), alignment="best", **ode)
    assert float(best.nats - each.nats) == pytest.approx(math.log(math.comb(5, 1)), abs=1e-4)  # 2 tokens, 6 frames


def test_bounds_and_losses_do_not_depend_on_padding():
    found, data = model(), batch()
    assert worst_difference(found, draws=5) < 1e-5
    together = model(time_sampler="uniform").loss(data, KeyedGenerator(0, data.index, "train", 3))
    data.x[~data.mask.expand_as(data.x)] = 77.0
    filled = model(time_sampler="uniform").loss(data, KeyedGenerator(0, data.index, "train", 3))
    assert torch.allclose(filled.per_example[[1]], together.per_example[[1]], atol=1e-5)


def test_the_network_is_told_the_scale_of_its_input():
    unet = {"channels": 8, "multipliers": [1, 2], "blocks": 1}
    for net, told in (unet, False), (unet | {"fourier": [2]}, True):
        found, seen = model(net=net), []
        found.core.denoiser.net.unet.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args))
        found.loss(data := batch(), KeyedGenerator(0, data.index, "train"))
        (args,), path = seen, found.core.denoiser.schedule
        assert (len(args) == 5) == told
        if told:
            scale = path.scale(path.time_of(args[1].double()))
            torch.testing.assert_close(args[4].double(), scale, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"path": "cosine", "time_sampler": "logit_normal"}, {
    "net": {"_target_": "genmodels.nn.dit.DiT", "width": 8, "depth": 1, "heads": 2}}], ids=str)  # fmt: skip
def test_paths_and_networks(options):
    found, data = model(**options), batch()
    found.loss(data, KeyedGenerator(0, data.index, "train")).value.backward()
    assert float(found.core.tts.encoder.head.weight.grad.abs().max()) > 0
    assert found.log_likelihood(data, draws=3).nats.isfinite().all()
    drawn = found.sample(2, text=["a cab", "bad dad said no"], steps=2)
    one = found.sample(1, text="bad dad said no", steps=2)
    frames = int(one.mask.sum())
    assert torch.allclose(drawn.x[1, :, :frames], one.x[0], atol=1e-3)


def test_ten_steps_of_euler_by_default_and_the_temperature_multiplies_all_noise():
    found, durations = gaussian(MelFlowMatching, 0.5), [[3, 1, 2, 2, 3]]
    mean = mean_of(found, "a cab", durations[0])
    drawn = [found.sample(1, text="a cab", durations=durations, temperature=t) for t in (0.0, 0.5, 2.0)]
    assert {key: drawn[0].made[key] for key in ("sampler", "steps", "spacing", "evaluations")} == {
        "sampler": "euler", "steps": 10, "spacing": "uniform_t", "evaluations": 10}
    away = [one.x[0] - mean for one in drawn]
    assert float(away[0].abs().max()) < 1e-4
    assert torch.allclose(4 * away[1], away[2], atol=1e-3) and float(away[1].abs().max()) > 0.1


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    first, last = parts_of_training(MelFlowMatching(spec(), **DIFFUSION, ema_decay=0))
    assert last["encoder_nll_per_dim"] < first["encoder_nll_per_dim"] - 0.1 and last["mse"] < first["mse"]


# ---- editing and infilling --------------------------------------------------------------------------------------

SAID = {"text": "a cab", "durations": [[3, 1, 2, 2, 3]]}


@pytest.mark.parametrize("family", FAMILIES)
def test_known_frames_are_returned_and_the_others_drawn(family):
    found = model(family)
    mel = found.sample(1, **SAID, seed=3, sampler="euler", steps=2).x[0]
    keep = (torch.arange(11) < 4)[None]
    drawn = found.sample(2, **SAID, known=mel, keep=keep, steps=3, rounds=2)
    assert torch.equal(drawn.x[:, :, :4], mel[:, :4].expand(2, -1, -1)) and drawn.made["kept"] == 4
    assert (drawn.made["sampler"], drawn.made["temperature"]) == ("ddpm", 1.0)
    assert ((drawn.x[:, :, 4:] - mel[:, 4:]).abs().amax((1, 2)) > 0.01).all()
    assert not torch.equal(drawn.x[0], drawn.x[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_editing_begins_at_the_mel_and_ends_in_a_sample(family):
    found = model(family, num_steps=1000)
    mel = found.sample(1, **SAID, seed=3, sampler="euler", steps=2).x[0]
    options = SAID | {"sampler": "euler", "spacing": "uniform_t", "steps": 4, "temperature": 1.0}
    near = found.sample(1, **options, edit=mel, strength=1e-3).x[0]
    free = found.sample(1, **options).x[0]
    assert float((near - mel).abs().max()) < 0.5 * float((free - mel).abs().max())
    whole = found.sample(1, **options, edit=mel, strength=1.0).x[0]
    alpha = float(found.core.schedule.alpha_sigma(torch.tensor(1.0))[0])
    assert float((whole - free).abs().max()) < 1e-4 + 20 * alpha  # nothing is left of the mel but alpha of it


def test_what_cannot_be_edited():
    found, mel = model(), torch.zeros(N_MELS, 11)
    for options, said in (({"edit": mel, "text": "a cab"}, "durations of this text come to"),
                          ({**SAID, "edit": mel, "sampler": "annealed_langevin"}, "not with annealed_langevin"),
                          ({**SAID, "known": mel}, "give both")):  # fmt: skip
        with pytest.raises(InputError, match=said):
            found.sample(1, **options)
