"""Masked diffusion as a model: its bound, samples that are keyed, parts that are kept, checkpoints."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import SamplingOptions
from genmodels.evaluation.likelihood import bounds_of
from genmodels.models.checkpoint import load_model
from genmodels.models.ddpm import DDPM
from genmodels.models.masked_diffusion import MaskedDiffusionModel
from genmodels.models.normalizing_flows import RealNVP
from genmodels.verification.check import Options
from genmodels.verification.checkpoints import verify
from tests.parameters import scattered
from tests.untrained import write

DIT = {"width": 16, "depth": 1, "heads": 2}
UNET = {"_target_": "genmodels.nn.unet.UNet", "channels": 8, "multipliers": [1, 2], "blocks": 1}
DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)


def small(spec=DIGITS, **options):
    torch.manual_seed(0)
    model = MaskedDiffusionModel(spec, **({"net": DIT, "width": 4, "num_steps": 50, "ema_decay": 0.0} | options)).eval()
    scattered(model.core, 0.05)
    return model


def test_each_model_names_the_bounds_that_it_has():
    assert bounds_of(small()) == ("continuous",) and bounds_of(DDPM(DIGITS)) == ("discrete", "continuous")
    assert bounds_of(RealNVP(DIGITS)) == ()


def batch(n=6, shape=(1, 8, 8)):
    x = torch.randint(0, 17, (n, *shape), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    return Batch(x, torch.arange(n) % 10, index=torch.arange(n))


@pytest.mark.parametrize("options", [{}, {"net": UNET}, {"masking": "cosine"}], ids=str)
def test_losses_are_keyed_and_have_gradients(options):
    model = small(**options)
    losses = [model.loss(batch(), KeyedGenerator(0, torch.arange(6), "train")) for _ in range(2)]
    assert torch.equal(losses[0].per_example, losses[1].per_example) and losses[0].times.sort().values.diff().allclose(
        torch.full((5,), 1 / 6, dtype=torch.float64))
    losses[0].value.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.core.parameters())


def test_at_the_start_it_is_uniform_and_training_lowers_the_bound():
    torch.manual_seed(0)
    model = MaskedDiffusionModel(DIGITS, net=DIT | {"patch": 1}, ema_decay=0.0)
    one = Batch(torch.full((16, 1, 8, 8), 3, dtype=torch.uint8), torch.zeros(16, dtype=torch.int64))
    options = {"weights": "raw", "draws": 8}
    before = model.log_likelihood(one, **options)
    error = before.standard_error("bits_per_dim").total
    assert abs(before.mean_bits_per_dim() - math.log2(17)) < 5 * error and before.kind == "lower_bound"
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(15):
        loss = model.loss(one, KeyedGenerator(0, torch.arange(16), "train", step=step)).value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model.log_likelihood(one, **options).mean_bits_per_dim() < 0.5 * before.mean_bits_per_dim()


@pytest.mark.parametrize("sampler", MaskedDiffusionModel.samplers)
def test_samples_are_those_of_their_number(sampler):
    model = small()
    options = {"sampler": sampler, "steps": 5, "guidance": 2.0}
    several, one = model.sample(4, path=3, **options), model.sample(1, start=2, cond=2, **options)
    assert several.x.dtype == torch.uint8 and several.x.max() < 17 and several.path.shape == (3, 4, 1, 8, 8)
    assert (several.x[2] != one.x[0]).sum() <= 1  # a rounded probability may move one token
    assert several.made["sampler"] == sampler and several.made["evaluations"] == 5
    assert not torch.equal(several.x, model.sample(4, seed=1, **options).x)
    assert torch.equal(model.sample(2, steps=1, temperature=0.0, cond=3).x[0],
                       model.sample(2, steps=1, temperature=0.0, cond=3, seed=5).x[1])


@pytest.mark.parametrize("sampler", MaskedDiffusionModel.samplers)
def test_guidance_is_one_call_on_a_doubled_batch(sampler):
    model = small()
    core, rows = model.weights(), []
    core.register_forward_pre_hook(lambda module, given: rows.append(len(given[0])))
    guided = model.sample(3, steps=5, guidance=2.0, sampler=sampler, seed=4)
    assert rows == [6] * 5 and guided.made["evaluations"] == 5
    options = SamplingOptions(n=3, guidance=2.0, seed=4)
    tokens = torch.full((3, 1, 8, 8), 17)
    labels, predict = model._conditioned(options, torch.arange(3))
    two = torch.lerp(core(tokens), core(tokens, labels), 2.0).log_softmax(-1)
    torch.testing.assert_close(predict(tokens, labels), two, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sampler", MaskedDiffusionModel.samplers)
def test_what_is_known_is_kept(sampler):
    known = batch().x[0]
    keep = torch.zeros(1, 8, 8, dtype=torch.bool)
    keep[:, ::2, 3:] = True
    found = small().sample(3, steps=4, sampler=sampler, known=known, keep=keep)
    assert (found.x == known)[:, keep].all() and not (found.x == known).all() and found.cond is None
    assert found.made["kept"] == int(keep.sum())


@pytest.mark.parametrize("spec", [
    DataSpec("colour", (3, 5, 7), levels=17), DataSpec("vectors", (6,), levels=17, num_classes=10),
    DataSpec("text", (1, 9), levels=256, encoding="utf-8")], ids=str)
def test_colours_vectors_and_text(spec):
    model = small(spec, net={"width": 16, "depth": 1, "heads": 2} if len(spec.event_shape) > 1 else None)
    found = model.log_likelihood(batch(shape=spec.event_shape), weights="raw", draws=2)
    assert found.nats.isfinite().all() and int(found.dims[0]) == spec.dims
    assert model.sample(2, steps=2).x.shape == (2, *spec.event_shape)


def test_a_checkpoint_holds_it(tmp_path):
    model = small()
    other, _ = load_model(write(model, tmp_path / "model.ckpt"))
    assert torch.equal(model.sample(2, steps=2).x, other.sample(2, steps=2).x)


def test_the_checks_of_whole_models_hold():
    report = verify(small(num_steps=12), small, batch(), None, Options(randomise=True))
    names = {check.name: check.status for whole in report.wholes for check in whole.checks}
    assert "all terms = stratified estimate" in names and set(names.values()) == {"passed"}


def test_options_that_do_not_fit():
    with pytest.raises(ValueError, match="is for integers, not for plane"):
        MaskedDiffusionModel(DataSpec("plane", (2,)))
    with pytest.raises(ValueError, match="steps must lie in 1..50"):
        small().sample(1, steps=51)
    with pytest.raises(ValueError, match="sampler must be one of ancestral, confidence"):
        small().sample(1, sampler="ddim")
    with pytest.raises(ValueError, match="bound must be one of continuous"):
        small().log_likelihood(batch(), bound="discrete")
    with pytest.raises(ValueError, match="give both"):
        small().sample(1, keep=torch.ones(1, 8, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="guidance needs"):
        small(cond_drop=0.0).sample(1, guidance=2.0)
    with pytest.raises(ValueError, match="guidance=0 draws without a class"):
        small().sample(1, guidance=0.0, cond=3)
