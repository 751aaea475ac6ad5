"""DDPM on sequences of unlike length and on vectors: trained, sampled and evaluated without a line of their own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import OdeDensity, invert
from genmodels.models.ddpm import DDPM
from genmodels.models.mels import with_noise

SIZE, CHANNELS = 12, 2
NET = {"channels": 16, "multipliers": [1, 2], "blocks": 1, "heads": 2}


def waves(n: int, seed: int = 0) -> Batch:
    """Two channels of one wave a quarter turn apart, of any phase, over 6 to 12 frames."""
    generator = torch.Generator().manual_seed(seed)
    phase = 2 * math.pi * torch.rand(n, 1, generator=generator)
    angle = phase + 0.8 * torch.arange(SIZE)
    x = 10 + 3 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(n, 2, SIZE, generator=generator)
    mask = torch.arange(SIZE) < torch.randint(6, SIZE + 1, (n, 1, 1), generator=generator)
    return Batch(x.masked_fill(~mask, math.nan), mask=mask, index=torch.arange(n))


def fitted(steps: int, make: Batch, model: DDPM, rows: int = 32) -> list[float]:
    """Losses of a plain training loop."""
    model.initialize(make)
    optimizer = torch.optim.Adam(model.core.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        position = torch.arange(rows)
        chosen = (step * rows + position) % len(make)
        loss = model.loss(make.rows(chosen), KeyedGenerator(0, position, "train", step))
        optimizer.zero_grad()
        loss.value.backward()
        optimizer.step()
        losses.append(float(loss.value.detach()))
    return losses


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model = DDPM(DataSpec("waves", (CHANNELS, SIZE), levels=None), num_steps=50, net=NET, ema_decay=0.0)
    before = model.log_likelihood(waves(30, 1), weights="raw", draws=5).nats.mean()
    losses = fitted(120, waves(512), model.train())
    return model.eval(), losses, before


def test_training_on_masked_sequences_learns(trained):
    model, losses, before = trained
    assert all(math.isfinite(value) for value in losses)
    assert sum(losses[-20:]) < 0.6 * sum(losses[:20])
    after = model.log_likelihood(waves(30, 1), weights="raw", draws=5).nats.mean()
    assert float(after) > float(before) + 5


def test_its_statistics_are_those_of_the_valid_frames(trained):
    model, data = trained[0], waves(512)
    valid = data.x.transpose(0, 1)[data.mask.expand_as(data.x).transpose(0, 1)].view(2, -1)
    assert torch.allclose(model.location[:, 0], valid.mean(1), atol=1e-3)
    assert torch.allclose(model.scale[:, -1], valid.std(1), atol=1e-3)
    assert bool((model.location == model.location[:, :1]).all())


def test_samples_have_their_lengths_and_look_like_waves(trained):
    samples = trained[0].sample(8, lengths=[SIZE, 7], weights="raw", steps=10)
    assert samples.x.shape == (8, CHANNELS, SIZE) and torch.isfinite(samples.x).all()
    assert bool((samples.x[1::2, :, 7:] == 0).all()) and bool((samples.x[0::2] != 0).all())
    radius = (samples.x[:, :, :7] - 10).square().sum(1).sqrt()
    assert 2 < float(radius.mean()) < 4
    alone = trained[0].sample(1, start=3, lengths=[SIZE, 7], weights="raw", steps=10)
    assert torch.allclose(alone.x[0], samples.x[3], atol=1e-3)


FEW = {"weights": "raw", "solver": "heun", "steps": 2}


def test_both_likelihoods_are_over_the_valid_frames_alone(trained):
    model, data = trained[0], waves(3, 1)
    bound, ode = model.log_likelihood(data, weights="raw", draws=5), model.ode_likelihood(data, **FEW)
    assert bound.dims.tolist() == ode.dims.tolist() == (2 * data.mask.sum((1, 2))).tolist()
    assert torch.isfinite(bound.nats).all() and torch.isfinite(ode.nats).all()
    other = Batch(data.x.nan_to_num(99.0), mask=data.mask, index=data.index)
    assert torch.allclose(model.log_likelihood(other, weights="raw", draws=5).nats, bound.nats)


def test_both_likelihoods_of_mels_are_of_the_same_noisy_ones():
    """What a model without noise says of the mels with the noise that is keyed by (seed 0, item)."""
    spec = DataSpec("mels", (2, SIZE), mel={}, statistics={"mean": 10.0, "std": 2.0, "frames": 4})
    model, data = DDPM(spec, num_steps=20, net=NET, ema_decay=0.0, noise=4.0).eval(), waves(3, 1)
    noisy = replace(data, x=with_noise(data.x, 4.0, KeyedGenerator(0, data.index, "likelihood")))
    found = model.log_likelihood(data, weights="raw", draws=5), model.ode_likelihood(data, **FEW)
    assert all(one.made["noise"] == 4.0 for one in found)
    model.noise = 0.0
    expected = model.log_likelihood(noisy, weights="raw", draws=5), model.ode_likelihood(noisy, **FEW)
    for one, same in zip(found, expected, strict=True):
        torch.testing.assert_close(one.nats, same.nats, rtol=1e-5, atol=1e-3)
        assert "noise" not in same.made


def test_latents_are_those_of_the_valid_frames(trained):
    model, data = trained[0], waves(3, 1)
    z = model.latents(data, weights="raw", steps=25)
    assert bool((z[0].masked_select(~data.mask) == 0).all())
    back = model.from_latents(z, weights="raw", steps=25, mask=data.mask)
    assert float((back - data.x).masked_select(data.mask).abs().max()) < 0.3
    assert bool((back.masked_select(~data.mask) == 0).all())
    size = int(data.mask[0].sum())
    alone = invert(model.core, model.encode(data.x)[:1, :, :size], model._latent_times(25))
    assert torch.allclose(z[0][:1, :, :size], alone, atol=1e-4)


def padding_matters(core) -> bool:
    """Whether a padded sequence has another density than the sequence alone."""
    x = torch.randn(1, CHANNELS, SIZE, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(SIZE)[None, None] < 7
    density = OdeDensity(solver="heun", steps=2)
    padded, alone = density(core, x, 6.0, mask=mask), density(core, x[:, :, :7], 6.0)
    return not torch.allclose(padded.log_prob, alone.log_prob, rtol=1e-4)


def test_a_padded_sequence_has_the_density_of_the_sequence_alone(trained, monkeypatch):
    core = trained[0].core
    assert not padding_matters(core)
    forward = type(core.net).forward

    def forgetful(self, x, log_snr, cond=None, mask=None):
        return forward(self, x, log_snr)

    monkeypatch.setattr(type(core.net), "forward", forgetful)
    assert padding_matters(core)  # a network that forgets its mask is caught


def test_wrong_lengths_are_refused_in_one_line(trained):
    for lengths in ([], [0], [SIZE + 1]):
        with pytest.raises(ValueError, match=f"from 1 to {SIZE}"):
            trained[0].sample(2, lengths=lengths)


def test_vectors_train_and_are_evaluated_by_the_same_code():
    torch.manual_seed(0)
    model = DDPM(DataSpec("v", (3,), levels=None), num_steps=50, net={"hidden": 32, "depth": 2}, ema_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    along, across = torch.randn(512, 1, generator=generator), torch.randn(512, 3, generator=generator)
    data = Batch(along * torch.tensor([1.0, -2.0, 5.0]) + 0.1 * across)
    losses = fitted(100, data, model, rows=64)
    assert sum(losses[-20:]) < 0.9 * sum(losses[:20])
    found = model.eval().ode_likelihood(data.rows(slice(0, 8)), weights="raw", tolerance=1e-3)
    assert found.kind == "ode" and torch.isfinite(found.nats).all()
    assert model.sample(5, steps=5, weights="raw").x.shape == (5, 3)
