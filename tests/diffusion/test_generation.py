"""Samples of a diffusion model: every sampler by its name, guidance, inpainting, editing, latents."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import SAMPLERS, EulerSampler
from genmodels.diffusion.samplers import Defaults
from genmodels.evaluation.materials import interpolate
from genmodels.models.ddpm import DDPM

DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
POINTS = DataSpec("points", (3,), levels=None)
ITEM = torch.randint(0, 17, (1, 8, 8), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
KEEP = torch.zeros(1, 8, 8, dtype=torch.bool)
KEEP[:, :, :4] = True


def small(spec: DataSpec = DIGITS, **options) -> DDPM:
    torch.manual_seed(0)
    if len(spec.event_shape) == 3:
        options = {"net": {"channels": 8, "multipliers": [1, 2], "blocks": 1}} | options
    model = DDPM(spec, **({"num_steps": 12, "ema_decay": 0.0} | options)).eval()
    with torch.no_grad():  # away from the zero start
        for p in model.core.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return model


MODEL = small()


def test_every_sampler_has_a_name_and_its_usual_steps():
    for name in SAMPLERS:
        samples = MODEL.sample(2, sampler=name)
        twice = name in ("heun", "edm", "flow")
        steps = {"flow_map": 4, "consistency": 2}.get(name, 12)
        assert samples.made["sampler"] == name and samples.made["steps"] == steps
        assert samples.made["evaluations"] == (23 if twice else steps)


WAYS = {
    "euler": {"sampler": "euler"},
    "heun": {"sampler": "heun"},
    "edm": {"sampler": "edm", "churn": 4.0},
    "unipc": {"sampler": "unipc"},
    "guided": {"guidance": 3.0, "guidance_rescale": 0.5, "guidance_interval": [-5, 5]},
    "unconditional": {"guidance": 0.0},
    "dynamic": {"clip": "dynamic"},
    "inpainted": {"known": ITEM, "keep": KEEP, "rounds": 2},
    "edited": {"edit": ITEM, "strength": 0.5, "sampler": "ddpm"},
    "edited to a class": {"edit": ITEM, "cond": 3, "guidance": 2.0},
}


@pytest.mark.parametrize("way", WAYS)
def test_sample_k_is_the_same_alone_and_in_any_batch(way):
    options = {"steps": 5, "seed": 5} | WAYS[way]
    whole = MODEL.sample(16, **options)
    assert whole.x.dtype == torch.uint8 and whole.x.shape == (16, 1, 8, 8) and int(whole.x.max()) <= 16
    for k in (0, 11):
        alone = MODEL.sample(1, start=k, **options)
        assert (whole.cond is None) == (alone.cond is None)
        assert (alone.x[0].int() - whole.x[k].int()).abs().max() <= 1
        assert (alone.x[0] == whole.x[k]).float().mean() > 0.98
    assert (MODEL.sample(16, **(options | {"seed": 6})).x == whole.x).float().mean() < 0.95


def test_guidance_one_is_plain_and_nought_is_the_null_class():
    plain = MODEL.sample(4, steps=4, cond=3)
    assert torch.equal(MODEL.sample(4, steps=4, cond=3, guidance=1.0).x, plain.x)
    nought = MODEL.sample(4, steps=4, guidance=0.0)
    assert nought.cond is None and not torch.equal(nought.x, plain.x)
    MODEL.cond_drop, keep = 0.0, MODEL.cond_drop
    try:
        with pytest.raises(ValueError, match="cond_drop=0"):
            MODEL.sample(2, guidance=3.0)
    finally:
        MODEL.cond_drop = keep


def test_the_condition_is_hidden_as_often_as_asked_and_by_key():
    model = small(cond_drop=0.25)
    cond = torch.arange(4000) % 10
    hidden = model._hidden(cond, KeyedGenerator(0, torch.arange(4000), "train"))
    dropped = hidden == 10
    assert abs(float(dropped.float().mean()) - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5
    assert torch.equal(hidden[~dropped], cond[~dropped])
    part = model._hidden(cond[100:200], KeyedGenerator(0, torch.arange(100, 200), "train"))
    assert torch.equal(part, hidden[100:200])
    never = small(cond_drop=0.0)
    assert never._hidden(cond, KeyedGenerator(0, torch.arange(4000), "train")) is cond
    assert small(POINTS)._hidden(None, KeyedGenerator(0, torch.arange(3), "train")) is None
    loss = model.loss(Batch(ITEM[None], torch.tensor([0])), KeyedGenerator(0, torch.arange(1), "train"))
    assert loss.value.isfinite()


@pytest.mark.parametrize("name", SAMPLERS)
def test_what_is_kept_comes_back_bit_for_bit(name):
    samples = MODEL.sample(3, known=ITEM, keep=KEEP, sampler=name, steps=3, rounds=2, path=2)
    assert torch.equal(samples.x[:, KEEP], ITEM[KEEP].expand(3, -1)) and samples.cond is None
    assert torch.equal(samples.path[-1], samples.x)
    assert samples.made["kept"] == 32 and samples.made["rounds"] == 2
    assert not torch.equal(samples.x[:, ~KEEP], ITEM[~KEEP].expand(3, -1))


def test_what_is_kept_of_continuous_data_comes_back_bit_for_bit():
    model = small(POINTS)
    model.location.fill_(3.7)
    model.scale.fill_(0.013)
    known, keep = torch.tensor([0.1, 3.71, -2.0]), torch.tensor([True, False, True])
    x = model.sample(5, known=known, keep=keep, steps=4).x
    assert torch.equal(x[:, keep], known[keep].expand(5, -1)) and x[:, 1].std() > 0


def test_an_edit_changes_the_more_the_stronger_it_is():
    changes = [
        float((MODEL.sample(8, edit=ITEM, strength=s).x.float() - ITEM.float()).abs().mean()) for s in (0.05, 0.5, 1.0)
    ]
    assert changes[0] < changes[1] < changes[2]
    assert MODEL.sample(1, edit=ITEM, strength=0.05, sampler="ddpm").made["evaluations"] == 1


def test_latents_lead_back_and_depend_on_the_class():
    model = small(num_steps=25)
    items = Batch(torch.stack([ITEM, ITEM.flip(1)]), torch.tensor([3, 3]))
    z = model.latents(items)
    assert (model.from_latents(z, items.cond).int() - items.x.int()).abs().max() <= 1
    assert not torch.allclose(model.latents(Batch(items.x))[0], z[0])
    strip = interpolate(model, items, 5)
    assert strip.shape == (5, 1, 8, 8) and (strip[[0, -1]].int() - items.x.int()).abs().max() <= 1
    mixed = interpolate(model, Batch(items.x, torch.tensor([3, 4])), 4)  # no common class: under none
    assert (mixed[[0, -1]].int() - items.x.int()).abs().max() <= 1
    with pytest.raises(ValueError, match="one class"):
        interpolate(small(cond_drop=0.0), Batch(items.x, torch.tensor([3, 4])), 4)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"sampler": "ddpm", "eta": 0.5}, "eta is an option of sampler=ddim, not of ddpm"),
        ({"churn": 3.0}, "churn is an option of sampler=edm"),
        ({"guidance_rescale": 0.5}, "go with guidance"),
        ({"guidance": 0.0, "cond": 3}, "leave cond out"),
        ({"clip": "soft"}, "static, dynamic"),
        ({"known": ITEM}, "give both"),
        ({"known": ITEM, "keep": KEEP, "edit": ITEM}, "leave one of the two out"),
        ({"known": ITEM[:, :4], "keep": KEEP}, r"got \(1, 4, 8\)"),
        ({"edit": ITEM, "size": [16, 16]}, "leave size out"),
        ({"edit": ITEM, "strength": 0.0}, "strength"),
        ({"known": ITEM, "keep": KEEP, "rounds": 0}, "rounds"),
    ],
)
def test_sampling_errors(options, said):
    with pytest.raises(ValueError, match=said):
        MODEL.sample(2, **options)


def test_guidance_needs_classes():
    with pytest.raises(ValueError, match="model with classes"):
        small(POINTS).sample(2, guidance=2.0)
    with pytest.raises(ValueError, match="cond_drop is a probability"):
        small(cond_drop=1.0)


class Coarse(EulerSampler):
    defaults = Defaults(3, "uniform_t")


def test_a_sampler_is_one_class_and_one_row_of_the_table(monkeypatch):
    monkeypatch.setitem(SAMPLERS, "coarse", Coarse)
    found = MODEL.sample(2, sampler="coarse")
    assert found.made["steps"] == 3 and found.made["spacing"] == "uniform_t"
    assert torch.equal(found.x, MODEL.sample(2, sampler="euler", steps=3, spacing="uniform_t").x)
    with pytest.raises(ValueError, match="eta is an option of sampler=ddim, not of coarse"):
        MODEL.sample(2, sampler="coarse", eta=0.5)
