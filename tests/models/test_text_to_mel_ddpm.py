"""model=mel_ddpm: diffusion around the text's mean, its bound against Gaussian truth, and items alone."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.core.random import FrameKeyedGenerator, KeyedGenerator
from genmodels.core.samples import SamplingOptions
from genmodels.core.tensors import event_sum
from genmodels.data.utterances import FLOOR
from genmodels.diffusion import SAMPLERS, SampleResult, generation
from genmodels.models import mel_diffusion
from genmodels.models.glow_tts import GlowTTS
from genmodels.models.mels import alone, even_lengths
from genmodels.models.text_to_mel import MelDDPM
from genmodels.speech.alignment import log_paths
from genmodels.speech.glow_tts import GlowTTS as SpeakingFlow
from tests.models.texts import DIFFUSION, ENCODER, N_MELS, batch, diffusion, gaussian, parts_of_training, spec

model, known = partial(diffusion, MelDDPM), partial(gaussian, MelDDPM)


def mean_of(found: MelDDPM, text: str, durations: list[int]) -> torch.Tensor:
    """The mean of every frame in log units, (n_mels, T), straight from the encoder."""
    condition = found.asked(SamplingOptions(text=text)).condition
    _, mu, _ = found.weights("ema").tts.encoder(condition.tokens, condition.mask)
    return found.units.inverse(mu[0].repeat_interleave(torch.tensor(durations), dim=1)).detach()


# ---- checks against a Gaussian ----------------------------------------------------------------------------------


def bound_error(found: MelDDPM, variance: float) -> float:
    """Standard errors between the bound in continuous time and the exact density of a Gaussian around the mean."""
    data = even_lengths(batch())
    estimate = found.log_likelihood(data, bound="continuous", draws=25, replicates=16, rows=1024)
    core, noise = found.weights("ema"), KeyedGenerator(0, data.index, "likelihood")
    u, volume = found.units(data, noise)
    aligned = core.tts.align(u, data.cond.tokens, data.mask, data.cond.mask)
    rest = u - torch.stack([mu.repeat_interleave(d, 1) if d.sum() == u.shape[2] else
                            torch.nn.functional.pad(mu.repeat_interleave(d, 1), (0, u.shape[2] - int(d.sum())))
                            for mu, d in zip(aligned.mu, aligned.durations, strict=True)])  # fmt: skip
    each = -0.5 * (rest.double().square() / variance + math.log(2 * math.pi * variance))
    paths = log_paths(data.cond.mask.sum((1, 2)), data.mask.sum((1, 2)))
    exact = event_sum(each, data.mask) + volume - paths
    return float((estimate.nats - exact).sum().abs() / estimate.stderr.square().sum().sqrt())


def test_the_bound_is_the_density_of_a_gaussian_around_the_mean(monkeypatch):
    assert bound_error(known(0.7), 0.7) < 4
    # The mean counted twice is caught.
    around = MelDDPM._around_mean

    def twice(self, core, u, data):
        aligned, x0, context = around(self, core, u, data)
        return aligned, 2 * x0 - u * data.mask, context

    monkeypatch.setattr(MelDDPM, "_around_mean", twice)
    assert bound_error(known(0.7), 0.7) > 10


def terminal_error(found: MelDDPM, monkeypatch, temperature: float = 0.5) -> float:
    """Samples that stop where they start, against mean + temperature eps."""
    durations, started = [[3, 1, 2, 2, 3]], []

    def at_once(denoiser, shape, times, sampler, generator, **options):
        eps = generator.at(0).normal(shape)
        started.append(eps)
        return SampleResult(options["temperature"] * eps * options["mask"], 0)

    monkeypatch.setattr(generation, "sample", at_once)
    drawn = found.sample(1, text="a cab", durations=durations, temperature=temperature)
    expected = mean_of(found, "a cab", durations[0]) + temperature * found.units.scale * started[0][0, :, :11]
    return float((drawn.x[0] - expected).abs().max())


def test_at_the_noisy_end_a_mel_is_its_mean_and_the_temperature_times_noise(monkeypatch):
    alpha, _ = model().core.schedule.alpha_sigma(torch.tensor(1.0))
    assert float(alpha) == pytest.approx(0.00665425, abs=1e-8) == math.exp(-10.025 / 2)
    assert terminal_error(model(), monkeypatch) < 1e-5  # of numbers about 5, in float32
    # The mean added twice is caught.
    right = SpeakingFlow.latent

    def twice(self, *arguments, **options):
        drawn = right(self, *arguments, **options)
        return drawn._replace(z=2 * drawn.z)

    monkeypatch.setattr(SpeakingFlow, "latent", twice)
    assert terminal_error(model(), monkeypatch) > 1e-2


@pytest.mark.parametrize("sampler", [*SAMPLERS, "annealed_langevin"])
def test_the_temperature_multiplies_all_noise(sampler):
    found, durations = known(0.5), [[3, 1, 2, 2, 3]]
    mean = mean_of(found, "a cab", durations[0])
    away = [found.sample(1, text="a cab", durations=durations, temperature=t, sampler=sampler, steps=10).x[0] - mean
            for t in (0.0, 0.5, 2.0)]  # fmt: skip
    assert float(away[0].abs().max()) < 1e-4
    # The exact denoiser is linear: what is beyond the mean is the temperature times the noise, not divided by it.
    assert torch.allclose(4 * away[1], away[2], atol=1e-3) and float(away[1].abs().max()) > 0.1


def test_samples_of_a_known_gaussian_have_its_standard_deviation():
    found = known(0.5)
    mean = mean_of(found, "a cab", [8] * 5)
    drawn = found.sample(64, text="a cab", durations=[[8] * 5], temperature=1.0, steps=100)
    rest = (drawn.x - mean) / found.units.scale
    count = rest.numel()
    assert abs(float(rest.mean())) < 4 * math.sqrt(0.5 / count)
    assert float(rest.var()) == pytest.approx(0.5, rel=0.05)


# ---- alone and in a batch ---------------------------------------------------------------------------------------


def worst_difference(found: MelDDPM, **options) -> float:
    data = batch()
    together = found.log_likelihood(data, **options)
    each = torch.cat([found.log_likelihood(alone(data, k), **options).nats for k in range(3)])
    return float(((together.nats - each).abs() / together.dims).max())


@pytest.mark.parametrize("options", [
    {"bound": "discrete"}, {"bound": "discrete", "draws": 5}, {"alignment": "best", "draws": 5},
])  # fmt: skip
@pytest.mark.parametrize("made", [{}, {"objective": "hybrid"}], ids=["beta", "learned"])
def test_likelihood_in_a_batch_is_that_alone(made, options, monkeypatch):
    found = model(**made)
    assert found.variance == ("learned" if made else "beta")
    assert worst_difference(found, **options) < 1e-5
    # Noise that depends on how long an item is padded is caught.
    monkeypatch.setattr(mel_diffusion, "FrameKeyedGenerator", KeyedGenerator)
    assert worst_difference(found, **options) > 1e-3


@pytest.mark.parametrize("objective", ["simple", "hybrid"])
def test_each_item_has_its_own_loss_whatever_the_padding_holds(objective):
    found, data = model(time_sampler="uniform", objective=objective), batch()
    together = found.loss(data, KeyedGenerator(0, data.index, "train", 3))
    filled = batch()
    filled.x[~filled.mask.expand_as(filled.x)] = 77.0
    assert torch.allclose(found.loss(filled, KeyedGenerator(0, data.index, "train", 3)).per_example[[1]],
                          together.per_example[[1]], atol=1e-5)  # fmt: skip
    for k in range(3):
        one = found.loss(alone(data, k), KeyedGenerator(0, data.index[k : k + 1], "train", 3))
        assert one.per_example[0].item() == pytest.approx(together.per_example[k].item(), abs=1e-5)
    parts = together.parts
    total = parts["encoder_nll_per_dim"] + parts["duration"] + parts["mse"]
    same = torch.allclose(total.double(), together.per_example.detach().double(), atol=1e-5)
    assert same == (objective == "simple")


def test_a_learned_variance_changes_the_discrete_bound_and_not_the_other(monkeypatch):
    found, data = model(objective="hybrid"), batch()
    options = {"draws": 5, "weights": "raw"}
    before = {bound: found.log_likelihood(data, bound=bound, **options).nats for bound in ("discrete", "continuous")}
    predict = found.core.denoiser.at_log_snr

    def narrower(*args):
        prediction = predict(*args)
        prediction.nu = prediction.nu - 0.5
        return prediction

    monkeypatch.setattr(found.core.denoiser, "at_log_snr", narrower)
    after = {bound: found.log_likelihood(data, bound=bound, **options).nats for bound in before}
    assert torch.equal(after["continuous"], before["continuous"])
    assert not torch.allclose(after["discrete"], before["discrete"])


def test_a_sample_is_the_same_alone_in_a_batch_and_later():
    found = model()
    texts = ["a cab", "bad dad said no", "ha"]
    for options in ({"sampler": "dpmpp_2m", "steps": 4}, {"sampler": "ddpm", "steps": 4}):
        together = found.sample(6, text=texts, seed=5, **options)
        for k, text in enumerate(texts):
            one = found.sample(1, text=text, seed=5, **options)
            frames = int(one.mask.sum())
            assert int(together.mask[k].sum()) == frames
            assert torch.allclose(together.x[k, :, :frames], one.x[0], atol=1e-3)
            assert not torch.allclose(together.x[k, :, :frames], together.x[3 + k, :, :frames], atol=1e-2)
        second = found.sample(1, text=texts, seed=5, start=4, **options)
        frames = int(second.mask.sum())
        assert torch.allclose(together.x[4, :, :frames], second.x[0, :, :frames], atol=1e-3)
        assert (together.x[~together.mask.expand_as(together.x)] == FLOOR).all()


def test_frames_depend_on_the_text_as_those_of_glow_tts_do():
    """One encoder, one aligner, one predictor: with the same weights the same durations and the same alignment."""
    torch.manual_seed(0)
    flow = GlowTTS(spec(), encoder=ENCODER, steps=1, hidden=8, depth=1, duration_channels=8)
    found = model()
    shared = {name: value for name, value in found.core.state_dict().items() if not name.startswith("denoiser")}
    assert not flow.core.load_state_dict(shared, strict=False).unexpected_keys
    options = {"text": ["a cab", "bad dad"], "weights": "raw", "temperature": 0.0}
    assert torch.equal(found.eval().sample(2, **options).durations, flow.eval().sample(2, **options).durations)
    flow.core.tts.decoder = found.core.tts.decoder
    assert torch.equal(found.aligned(batch(), "raw").path, flow.aligned(batch(), "raw").path)


def test_evidence_compares_densities_of_the_aligner_under_other_texts():
    """One encoder, one aligner: a flow that does nothing finds the same evidence for the texts of the same mels."""
    torch.manual_seed(0)
    flow = GlowTTS(spec(), encoder=ENCODER, steps=1, hidden=8, depth=1, duration_channels=8)
    found, data, others = model(), batch(), [[[4, 9], [7, 7, 7, 7]], [[3] * 9, [6, 5]], [[8], [2, 3, 4, 5]]]
    flow.core.tts = found.core.tts
    evidence = found.evidence(data, others, "raw")
    assert torch.allclose(evidence, flow.eval().evidence(data, others, "raw"), atol=1e-5)
    exact = []
    for k, texts in enumerate(others):
        one, noise = found.keyed(alone(data, k), 0)
        own = data.cond.tokens[k, data.cond.mask[k, 0]].tolist()
        nats = torch.cat([found.core.tts.log_prob(found.units(one, noise)[0], torch.tensor([tokens]), one.mask)
                          for tokens in (own, *texts)]).double().detach()  # fmt: skip
        exact.append(float(nats[0] - nats[1:].exp().mean().log()) / int(one.mask.sum()))
    assert evidence.tolist() == pytest.approx(exact, abs=1e-4)


# ---- what is stated, and what is refused ------------------------------------------------------------------------


def test_both_alignments_are_labelled_and_differ_by_their_prior():
    found, data = model(), batch()
    marginal, best = (found.log_likelihood(data, draws=5, alignment=kind) for kind in ("marginal", "best"))
    assert marginal.kind == best.kind == "lower_bound" and marginal.made["noise"] == 0.05
    assert marginal.made["given"] == "text, through its best alignment"
    assert best.made["given"] == "text and its best alignment"
    paths = log_paths(data.cond.mask.sum((1, 2)), even_lengths(data).mask.sum((1, 2)))
    assert torch.allclose(best.nats - marginal.nats, paths.double(), atol=1e-6)
    assert set(marginal.parts) == {"prior", "diffusion", "reconstruction", "scale", "alignment"}
    assert torch.allclose(-sum(marginal.parts.values()), marginal.nats)
    assert marginal.dims.tolist() == [N_MELS * t for t in (10, 14, 6)]
    with pytest.raises(ValueError, match="one of marginal, best"):
        found.log_likelihood(data, alignment="viterbi")


@pytest.mark.parametrize("options", [
    {"objective": "vlb", "variance": "learned"}, {"objective": "continuous", "schedule": "learned"},
    {"objective": "hybrid", "variance": "learned", "schedule": "linear", "num_steps": 30}, {"parameterisation": "eps"},
    {"schedule": "cosine", "weighting": "min_snr"}, {"self_conditioning": True, "parameterisation": "x0"},
    {"time_sampler": "loss_aware"},
])  # fmt: skip
def test_what_ddpm_can_be_this_can_be(options):
    found, data = model(**options), batch()
    loss = found.loss(data, KeyedGenerator(0, data.index, "train"))
    loss.value.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in found.core.parameters())
    assert float(found.core.tts.encoder.head.weight.grad.abs().max()) > 0
    assert found.log_likelihood(data, draws=3).nats.isfinite().all()
    assert found.sample(1, steps=2).x.isfinite().all()
    drawn = found.sample(1, steps=10, sampler="annealed_langevin")
    assert drawn.x.isfinite().all() and drawn.made["evaluations"] == 21


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    found = MelDDPM(spec(), **DIFFUSION, ema_decay=0)
    first, last = parts_of_training(found)
    assert last["encoder_nll_per_dim"] < first["encoder_nll_per_dim"] - 0.1
    assert last["duration"] < 0.8 * first["duration"] and last["mse"] < first["mse"]


def test_speed_seconds_durations_and_the_shortest_mels():
    found = model()
    exact = found.sample(1, text="bad dad", seconds=0.5, steps=2)
    assert int(exact.mask.sum()) == math.ceil(0.5 * 22050 / 256) == 44
    given = [[2, 1, 3, 1, 1, 2, 4]]
    assert found.sample(2, text="bad dad", durations=given, steps=2).durations[1].tolist() == given[0]
    assert found.sample(1, text="a", durations=[[1]], steps=2).x.shape == (1, N_MELS, 1)
    for wrong, reason in (({"seconds": 0.01}, r"at least 7 frames; seconds=0.08"), ({"speed": 0.0}, "speed"),
                          ({"durations": [[1, 2]]}, "7 tokens"), ({"cond": "bob"}, "one voice"),
                          ({"temperature": -1.0}, "temperature"), ({"sampler": "rk4"}, "sampler"),
                          ({"steps": 13}, "steps must lie in 1..12"), ({"churn": 1.0}, "sampler=edm")):
        with pytest.raises(ValueError, match=reason):
            found.sample(1, text="bad dad", **wrong)


def test_speakers_by_name():
    found = model(("anna", "ben"))
    anna, ben = (found.sample(1, cond=name, text="a cab", temperature=0.0, durations=[[2] * 5], steps=3).x
                 for name in ("anna", "ben"))
    assert not torch.allclose(anna, ben, atol=1e-3)
    assert found.log_likelihood(batch(speaker=True), draws=3).nats.isfinite().all()


def test_short_events_are_padded_where_it_changes_nothing():
    net, mask = model().core.denoiser.net, torch.ones(2, 1, 1).bool()
    generator = FrameKeyedGenerator(0, torch.arange(2), "s")
    x, context = (generator.child(name).normal((2, N_MELS, 4)) for name in ("x", "context"))
    short = net(x[..., :1], torch.zeros(2), context[..., :1])
    valid = torch.nn.functional.pad(mask, (0, 3))
    assert torch.allclose(short, net(x, torch.zeros(2), context, valid)[..., :1], atol=1e-6)


@pytest.mark.parametrize("options, reason", [
    ({"encoder": ENCODER | {"learn_sigma": True}}, "learn_sigma is for model=glow_tts"),
    ({"num_steps": 1}, "num_steps"), ({"objective": "vlb", "weighting": "p2"}, "weighting=p2"),
    ({"net": {"width": 3}}, "no option 'width'"), ({"schedule": "sigmoid", "parameterisation": "eps"}, "eps"),
])  # fmt: skip
def test_options_that_do_not_go_together(options, reason):
    with pytest.raises(InputError, match=reason):
        MelDDPM(spec(), **DIFFUSION | options)
    with pytest.raises(InputError, match="model=mel_ddpm is for data=speech"):
        MelDDPM(DataSpec("mels", (6, 32), mel={}, statistics={"mean": 0.0, "std": 1.0}))
