"""What makes diffusion fast leaves its numbers alone: compiled in one piece, bf16, channels-last, fused attention."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import Denoiser, q_sample
from genmodels.models.ddpm import DDPM
from genmodels.nn import attention as attention_room
from genmodels.nn import attention_block as spatial_attention
from tests.parameters import scattered

SMALL = {"channels": 16, "multipliers": [1, 2], "blocks": 1, "heads": 2}
IMAGES = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
SEQUENCES = DataSpec("sequences", (3, 12), levels=None)


def small(spec=IMAGES, **options) -> DDPM:
    torch.manual_seed(0)
    model = DDPM(spec, num_steps=20, ema_decay=0.0, net=SMALL | options.pop("net", {}), **options)
    scattered(model.core, 0.05)
    return model


def items(spec=IMAGES, n=8) -> Batch:
    generator = torch.Generator().manual_seed(1)
    if spec.levels is None:
        mask = torch.arange(12) < torch.randint(1, 13, (n, 1, 1), generator=generator)
        return Batch(torch.randn(n, *spec.event_shape, generator=generator), mask=mask, index=torch.arange(n))
    x = torch.randint(0, spec.levels, (n, *spec.event_shape), generator=generator).to(torch.uint8)
    return Batch(x, torch.arange(n) % 10, index=torch.arange(n))


def training_loss(core: Denoiser, x0, noise, t, cond, mask):
    """The simple loss from given noise: schedule, network, target and mean in one function."""
    log_snr = core.schedule.log_snr(t)
    prediction = core(q_sample(x0, log_snr, noise), t, cond, mask)
    return (core.parameterisation.target(x0, noise, log_snr) - prediction.output).square().mean()


def sampling_step(core: Denoiser, x, t, s, cond, mask):
    """The estimate of x_0 at t and the move of DDIM to s."""
    prediction = core(x, t.expand(len(x)), cond, mask)
    alpha, sigma = core.schedule.alpha_sigma(s)
    return alpha * prediction.x0 + sigma * prediction.eps


@pytest.fixture
def fresh_compiler():
    """What was compiled before is forgotten, also what a mutant left behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("spec, parameterisation", [
    (IMAGES, "v"), pytest.param(SEQUENCES, "eps", marks=pytest.mark.slow)
], ids=["images", "sequences"])  # fmt: skip
@pytest.mark.usefixtures("fresh_compiler")
def test_a_training_step_and_a_sampling_step_trace_in_one_piece(spec, parameterisation):
    model, batch = small(spec, parameterisation=parameterisation, net={"blocks": 1, "multipliers": [1]}), items(spec)
    x0, cond = model.encode(batch.x), model._cond(batch)
    noise, t = torch.randn(x0.shape), torch.rand(len(x0), dtype=torch.float64)
    whole = torch.compile(training_loss, fullgraph=True, backend="eager")
    losses = [f(model.core, x0, noise, t, cond, batch.mask) for f in (training_loss, whole)]
    gradients = [torch.autograd.grad(loss, list(model.core.parameters())) for loss in losses]
    assert torch.allclose(*losses, rtol=1e-6)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*gradients, strict=True))
    step = torch.compile(sampling_step, fullgraph=True, backend="eager")
    s, t = (torch.tensor(v, dtype=torch.float64) for v in (0.3, 0.5))
    with torch.no_grad():
        moved = [f(model.core, noise, t, s, cond, batch.mask) for f in (sampling_step, step)]
    assert torch.allclose(*moved, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("fresh_compiler")
def test_that_check_catches_a_graph_break(monkeypatch):
    forward = Denoiser.at_log_snr

    def broken(self, x, *given):
        torch._dynamo.graph_break()
        return forward(self, x, *given)

    monkeypatch.setattr(Denoiser, "at_log_snr", broken)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        test_a_training_step_and_a_sampling_step_trace_in_one_piece(IMAGES, "v")


@pytest.mark.parametrize("spec", [IMAGES, SEQUENCES], ids=lambda spec: spec.name)
def test_bf16_changes_the_loss_by_less_than_one_per_cent_and_leaves_the_schedule_wide(spec, monkeypatch):
    model, batch = small(spec), items(spec, 32)
    seen = []
    forward = type(model.core.net).forward

    def watched(self, x, log_snr, *given):
        y = forward(self, x, log_snr, *given)
        seen.append((log_snr.dtype, y.dtype, self.stem(torch.zeros_like(x)).dtype))
        return y

    monkeypatch.setattr(type(model.core.net), "forward", watched)
    losses = []
    for reduced in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=reduced):
            losses.append(float(model.loss(batch, KeyedGenerator(0, torch.arange(32), "train")).value.detach()))
            prediction = model.core(torch.zeros(2, *spec.event_shape), torch.tensor([0.0, 1.0]))
            assert model.core.schedule.log_snr(torch.tensor([0.5])).dtype == torch.float64
            assert prediction.x0.dtype == prediction.eps.dtype == torch.float32
    assert losses[0] != losses[1] and abs(losses[1] / losses[0] - 1) < 0.01
    assert [row[2] for row in seen] == [torch.float32] * 2 + [torch.bfloat16] * 2  # the network did run in bf16
    assert all(log_snr == torch.float32 and y == torch.float32 for log_snr, y, _ in seen)


def test_channels_last_gives_the_same_samples_and_keeps_its_format_through_the_network():
    plain, last = small(), small(net={"channels_last": True})
    options = {"steps": 4, "weights": "raw", "clip": False}
    assert (plain.sample(4, **options).x.int() - last.sample(4, **options).x.int()).abs().max() <= 1
    formats = []
    last.core.net.middle[0].register_forward_pre_hook(
        lambda module, given: formats.append(given[0].is_contiguous(memory_format=torch.channels_last))
    )
    last.sample(2, **options)
    assert formats and all(formats)


@pytest.mark.parametrize("kind, room", [("plain", spatial_attention.nn.functional),
                                        ("rope2d", attention_room.backend)])
def test_attention_is_torchs_fused_one(kind, room, monkeypatch):
    model, calls = small(net={"attention": kind}), []
    fused = room.scaled_dot_product_attention

    def counted(*given, **options):
        calls.append(given[0].shape)
        return fused(*given, **options)

    monkeypatch.setattr(room, "scaled_dot_product_attention", counted)
    model.loss(items(), KeyedGenerator(0, torch.arange(8), "train"))
    # One down, one in the middle, two on the way up: all of them at 4x4 = 16 positions.
    assert len(calls) == 4 and all(shape[-2] == 16 for shape in calls)


@pytest.mark.slow
def test_a_compiled_network_samples_the_same_pictures():
    model = small().eval()
    compiled = small().eval()
    compiled.core.net = torch.compile(compiled.core.net, fullgraph=True)
    options = {"steps": 6, "weights": "raw", "seed": 1}
    pictures = [m.sample(4, **options).x.int() for m in (model, compiled)]
    assert (pictures[0] - pictures[1]).abs().max() <= 1
