"""TarFlow as a model: its two uses kept apart, guidance, ways of sampling."""

from __future__ import annotations

import re

import pytest
import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.flows.discrete import NoisyFlow
from genmodels.flows.tarflow import Decoding, MetaBlock
from genmodels.models.normalizing_flows import TarFlow
from genmodels.training.run import figures_of
from tests.parameters import scattered

DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
SMALL = {"blocks": 2, "width": 16, "depth": 1, "heads": 2, "ema_decay": 0}


def batch(n=24):
    x = torch.randint(0, 17, (n, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return Batch(x, torch.arange(n) % 10, index=torch.arange(n))


def made(size=0.1, **options):
    torch.manual_seed(0)
    model = TarFlow(DIGITS, **SMALL, **options)
    model.initialize(batch())
    scattered(model.core, size, seed=1)
    return model.eval()


def test_a_model_of_noisy_data_states_no_likelihood():
    model = made(augment=0.1, preprocess="centre")
    found = model.log_likelihood(batch())
    assert found.kind == "unnormalised" and found.nats.isnan().all() and "noise of 0.1" in found.made["reason"]
    assert found.mean_bits_per_dim() is None or found.mean_bits_per_dim() != found.mean_bits_per_dim()
    assert made(preprocess="centre").log_likelihood(batch()).kind == "lower_bound"
    loss = model.loss(batch(), KeyedGenerator(0, torch.arange(24), "train"))
    nats, _ = model.core.log_prob(batch().x, generator=KeyedGenerator(0, torch.arange(24), "train"))
    assert torch.allclose(loss.per_example, -nats / 64) and torch.allclose(loss.value, -nats.mean() / 64)
    model.log = lambda *args, **options: None
    model.validation_step(batch(), 0)
    model.on_validation_epoch_end()
    assert re.fullmatch(r"= -?\d\.\d+\(\d+\)", figures_of(model)["val/noisy_nll_per_dim"])


def test_its_noise_has_the_size_asked_for():
    core = made(augment=0.2, preprocess="centre", dequantisation="level").core
    assert isinstance(core, NoisyFlow)
    x = torch.full((500, 1, 8, 8), 3)
    v, contribution = core.dequantize(x, KeyedGenerator(0, torch.arange(500), "noise"))
    # 32,000 draws: the standard error of their standard deviation is 0.4 %.
    assert abs(float(v.std()) / 0.1 - 1) < 0.02 and abs(float(v.mean()) - 3.5 / 17) < 0.003
    assert (contribution == 0).all()


@pytest.mark.parametrize("cond", [None, torch.tensor([3, 0, 7])])
def test_samples_are_denoised_by_the_score(cond):
    """Given the class, by the score given that class."""
    model = made(augment=0.2, preprocess="centre", class_conditional=cond is not None).double()
    with torch.no_grad():
        y, x = (draw(3, cond, generator=KeyedGenerator(5, torch.arange(3), "sample"))
                for draw in (model.core.flow.sample, model.core.points))
    v = y.clone().requires_grad_()
    (score,) = torch.autograd.grad(model.core.flow.log_prob(v, cond).sum(), v)
    assert torch.allclose(x, y + 0.1**2 * score, atol=1e-12) and (x - y).abs().max() > 1e-3
    given = {} if cond is None else {"cond": cond.tolist()}
    assert torch.equal(model.sample(3, seed=5, **given).x, model.core.quantise(x).to(torch.uint8))


@pytest.mark.parametrize("sampler", ["gauss_seidel", "jacobi"])
def test_samplers_agree_within_their_tolerance(sampler):
    model = made(size=0.06)
    one = model.sample(4, sampler="sequential")
    other = model.sample(4, sampler=sampler)
    assert other.made["sampler"] == sampler and other.made["evaluations"] < one.made["evaluations"] == 2 * 15
    moved = (one.x.int() - other.x.int()).abs()  # only values at the end of a cell; at a tolerance of 0.1 four of 256
    assert moved.max() <= 1 and moved.sum() <= 1
    assert all(block.decoding == Decoding() for block in model.modules() if isinstance(block, MetaBlock))


def test_guidance_strengthens_the_class():
    model = made(class_conditional=True)
    plain, guided = (model.sample(4, guidance=g, cond=3).x for g in (1.0, 3.0))
    none = model.sample(4, guidance=0.0)  # without any class
    assert not torch.equal(plain, guided) and not torch.equal(plain, none.x) and none.cond is None
    with pytest.raises(InputError, match="guidance=0 draws without a class: leave cond out"):
        model.sample(4, guidance=0.0, cond=7)


def test_training_hides_some_classes():
    model = made(class_conditional=True, cond_drop=0.5)
    seen = []
    model.core.flow.bijection.register_forward_pre_hook(lambda module, given: seen.append(given[1]))
    model.loss(batch(), KeyedGenerator(0, torch.arange(24), "train"))
    hidden = seen[0] == 10
    assert 4 <= int(hidden.sum()) <= 20 and torch.equal(seen[0][~hidden], batch().cond[~hidden])


def sequences(**options):
    """A model of sequences, and four of unlike length."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([12, 7, 1, 9])
    mask = (torch.arange(12) < lengths[:, None])[:, None]
    x = torch.randn(4, 2, 12, generator=generator).masked_fill(~mask, float("nan"))
    torch.manual_seed(0)
    model = TarFlow(DataSpec("waves", (2, 12)), attention="xl", **SMALL, **options)
    model.initialize(Batch(x, mask=mask))
    with torch.no_grad():
        for p in model.core.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return model.double().eval(), x.double(), mask


@pytest.mark.parametrize("transform", ["affine", "mixture"])
def test_padding_of_any_content_changes_no_likelihood(transform):
    model, x, mask = sequences(transform=transform)
    whole = model.log_likelihood(Batch(x, mask=mask)).nats
    for row in range(4):
        alone = model.log_likelihood(Batch(x[row : row + 1].nan_to_num(5.0), mask=mask[row : row + 1]))
        assert abs(float(alone.nats - whole[row])) < 1e-9


def test_samples_are_zero_beyond_their_lengths():
    model, *_ = sequences()
    drawn = [model.sample(3, lengths=[12, 7, 4], sampler=sampler).x for sampler in ("sequential", "jacobi")]
    assert (drawn[0][1, :, 7:] == 0).all() and (drawn[0][2, :, 4:] == 0).all() and drawn[0][2, :, :4].all()
    assert torch.allclose(*drawn, atol=0.05)


def test_a_model_of_classes_is_also_used_without_one():
    model, items = made(class_conditional=True).double(), batch(3)
    free, null = model.latents(Batch(items.x)), model.latents(Batch(items.x, torch.full((3,), 10)))
    assert torch.equal(free.flatten(), null.flatten())
    assert torch.equal(model.from_latents(free), items.x)
    assert not torch.equal(model.latents(items).flatten(), free.flatten())


def test_without_guidance_no_class_has_a_part_in_the_denoising():
    model = made(class_conditional=True, augment=0.2, preprocess="centre").double()
    found = model.sample(4, guidance=0)
    noise = KeyedGenerator(0, torch.arange(4), "sample")
    with torch.no_grad():
        expected = model.core.quantise(model.core.points(4, torch.full((4,), 10), generator=noise))
    assert torch.equal(found.x, expected.to(torch.uint8)) and found.cond is None


def test_decoded_latents_of_noisy_data_are_denoised():
    model = made(augment=0.2, preprocess="centre").double()
    z = model.latents(batch(3))
    with torch.no_grad():
        expected = model.core.quantise(model.core.denoise(model.core.flow.from_latents(z)))
    assert torch.equal(model.from_latents(z), expected.to(torch.uint8))


def noisy_sequences():
    """A model of noisy sequences of integers, and four of unlike length with other integers beyond their ends."""
    mask = (torch.arange(8) < torch.tensor([8, 4, 1, 6])[:, None])[:, None]
    x = torch.randint(0, 17, (4, 2, 8), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = TarFlow(DataSpec("marks", (2, 8), levels=17), augment=0.2, preprocess="centre", **SMALL)
    model.initialize(Batch(x, mask=mask))
    scattered(model.core, 0.2, seed=1)
    return model.double().eval(), [Batch(rows, mask=mask, index=torch.arange(4)) for rows in (x, (x + 5) % 17)]


def test_noisy_sequences_are_judged_by_their_valid_frames():
    model, (batch, other) = noisy_sequences()
    found = []
    for items in (batch, Batch(torch.where(batch.mask, batch.x, other.x), mask=batch.mask, index=batch.index)):
        model.log = lambda *args, **options: None
        model.validation_step(items, 0)
        found.append(model._pending.pop().nats)
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


def test_noisy_sequences_are_denoised_in_their_valid_frames():
    model, (batch, _) = noisy_sequences()
    y = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = model.core.denoise(y, None, batch.mask)
    again = model.core.denoise(torch.where(batch.mask, y, y + 1), None, batch.mask)
    torch.testing.assert_close(found * batch.mask, again * batch.mask, rtol=1e-10, atol=1e-10)
    latents = model.latents(batch)
    expected = model.core.quantise(model.core.denoise(model.core.flow.from_latents(latents, None, batch.mask), None,
                                                      batch.mask))  # fmt: skip
    assert torch.equal(model.from_latents(latents, mask=batch.mask), expected * batch.mask)
    lengths = [8, 4, 1, 6]
    drawn, noise = model.sample(4, lengths=lengths), KeyedGenerator(0, torch.arange(4), "sample")
    with torch.no_grad():
        points = model.core.flow.sample(4, generator=noise, mask=batch.mask)
    assert torch.equal(drawn.x, model.core.quantise(model.core.denoise(points, None, batch.mask)) * batch.mask)


@pytest.mark.parametrize("make, words", [
    (lambda: TarFlow(DIGITS, augment=0.1), "augment=0.1 is for integers with model.preprocess=centre"),
    (lambda: TarFlow(DataSpec("tracks", (4, 16)), augment=0.1, preprocess="centre"), "is for integers"),
    (lambda: TarFlow(DIGITS, augment=-1.0), "augment must be a finite number from 0"),
    (lambda: TarFlow(DIGITS, augment=0.1, preprocess="centre", dequantisation="variational"), "leave one of them out"),
    (lambda: TarFlow(DataSpec("tracks", (4, 16)), preprocess="centre"), "preprocess=centre is for integers"),
    (lambda: TarFlow(DataSpec("tracks", (4, 16)), alpha=0.1), "alpha=0.1 is for integers"),
    (lambda: TarFlow(DIGITS, augment=float("inf"), preprocess="centre"), "augment must be a finite number from 0"),
    (lambda: TarFlow(DIGITS, cond_drop=0.5), "give class_conditional=true"),
    (lambda: TarFlow(DIGITS, class_conditional=True, base="class"), "give cond_drop=0"),
    (lambda: TarFlow(DIGITS, noise=0.3), "noise=0.3 is for mels"),
    (lambda: TarFlow(DataSpec("tracks", (4, 16)), dequantisation="level"), "is for integers"),
    (lambda: made().sample(1, lengths=[4]), "lengths are for sequences"),
    (lambda: TarFlow(DataSpec("tracks", (4, 16)), patch=4, blocks=1, width=8, depth=1, heads=2).sample(1, lengths=[6]),
     "lengths must be multiples of 4 frames, which this flow takes together, got 6"),
    (lambda: TarFlow(DIGITS, components=4), "components=4 is for transform=mixture"),
    (lambda: TarFlow(DIGITS, cond_drop=1.0), "from 0 to below 1"),
    (lambda: made().sample(1, sampler="ddim"), "sampler"),
    (lambda: made().sample(1, guidance=2.0), "guidance needs a model that was trained with"),
])  # fmt: skip
def test_errors_are_one_line(make, words, refuses):
    refuses((ValueError, InputError), words, make)
