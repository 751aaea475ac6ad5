"""The parts of the U-Net against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import functional_call

from genmodels.nn import (
    ChannelNorm,
    ConditionEmbedding,
    DiT,
    GroupNorm,
    MLPDenoiser,
    ResidualBlock,
    UNet,
    Upsample,
    group_count,
    log_snr_features,
)
from genmodels.nn.blocks import NarrowConv2d, fourier_features, resized_twice_convolution
from genmodels.nn.energy_nets import EnergyConv, EnergyMLP
from genmodels.nn.transformer import SpeechEncoder, Transformer
from genmodels.speech.tacotron import Tacotron
from genmodels.speech.text_encoder import TextEncoder


def upsampled_by_loop(x, size, weight, bias):
    """Each position copies the nearest one below it, then a 3x3 convolution, tap by tap; two dimensions."""
    large = torch.zeros(*x.shape[:2], size[0] + 2, size[1] + 2, dtype=x.dtype)
    for i in range(size[0]):
        for j in range(size[1]):
            large[:, :, i + 1, j + 1] = x[:, :, i // 2, j // 2]
    y = torch.zeros(len(x), len(weight), *size, dtype=x.dtype)
    for i in range(size[0]):
        for j in range(size[1]):
            y[:, :, i, j] = torch.einsum("bcij,ocij->bo", large[:, :, i : i + 3, j : j + 3], weight) + bias
    return y


def example(height, width):
    torch.manual_seed(height * 100 + width)
    upsample = Upsample(2, 3, 2).double()
    return upsample, torch.randn(2, 3, height, width, dtype=torch.float64)


SIZES = [(2, 2), (1, 2), (2, 4), (8, 8), (7, 7), (5, 6), (6, 5), (1, 1), (33, 4)]


@pytest.mark.parametrize("size", SIZES)
def test_upsample_equals_the_loop(size):
    upsample, x = example(-(-size[0] // 2), -(-size[1] // 2))
    expected = upsampled_by_loop(x, size, upsample.conv.weight, upsample.conv.bias)
    assert torch.allclose(upsample(x, size), expected, atol=1e-12)
    channels_last = upsample(x.contiguous(memory_format=torch.channels_last), size)
    assert torch.allclose(channels_last, expected, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 4189, 4190])
def test_upsample_of_long_sequences(length):
    """Position j of the result has the value of position j // 2, also where float32 would round to the next."""
    upsample, x = Upsample(1, 1, 1), torch.arange(-(-length // 2)).float()[None, None]
    with torch.no_grad():
        upsample.conv.weight.copy_(torch.tensor([[[0.0, 1.0, 0.0]]]))
        upsample.conv.bias.zero_()
        assert upsample(x, (length,))[0, 0].tolist() == [j // 2 for j in range(length)]


def test_check_catches_swapped_parities():
    upsample, x = example(3, 4)
    weight, bias = upsample.conv.weight, upsample.conv.bias
    expected = upsampled_by_loop(x, (6, 8), weight, bias)
    assert torch.allclose(resized_twice_convolution(x, weight, bias), expected, atol=1e-12)
    for wrong in (weight.transpose(2, 3), weight.flip(2)):
        assert not torch.allclose(resized_twice_convolution(x, wrong, bias), expected, atol=1e-2)


def narrow_convolution(x, weight, bias):
    layer = NarrowConv2d(weight.shape[1], len(weight), 3, padding=1)
    return functional_call(layer, {"weight": weight, "bias": bias}, x)


@pytest.mark.parametrize("space", [(1, 1), (2, 3), (7, 4)])
@pytest.mark.parametrize("out_channels", [1, 3])
def test_narrow_convolution_is_a_convolution(space, out_channels):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, *space).double(), torch.randn(out_channels, 5, 3, 3).double()
    bias = torch.randn(out_channels).double()
    expected = torch.nn.functional.conv2d(x, weight, bias, padding=1)
    assert torch.allclose(narrow_convolution(x, weight, bias), expected, atol=1e-12)
    if min(space) > 1:
        # Mutant: the taps not turned round.
        assert not torch.allclose(narrow_convolution(x, weight.flip(2, 3), bias), expected, atol=1e-2)


def test_gradients_of_the_narrow_convolution():
    torch.manual_seed(0)
    x, weight = torch.randn(1, 2, 2, 3).double(), torch.randn(1, 2, 3, 3).double()
    inputs = (x.requires_grad_(), weight.requires_grad_(), torch.zeros(1).double().requires_grad_())
    assert torch.autograd.gradcheck(narrow_convolution, inputs)
    assert torch.autograd.gradgradcheck(narrow_convolution, inputs)


def test_gradients_of_the_short_form():
    upsample, x = example(1, 2)
    inputs = (x.requires_grad_(), upsample.conv.weight, upsample.conv.bias)
    assert torch.autograd.gradcheck(resized_twice_convolution, inputs)


@pytest.mark.parametrize("dims, space", [(1, (7,)), (2, (4, 5))])
@pytest.mark.parametrize("out_channels", [8, 12])
def test_residual_block_is_its_skip_at_the_start(dims, space, out_channels):
    torch.manual_seed(0)
    block = ResidualBlock(dims, 8, out_channels)
    x = torch.randn(2, 8, *space)
    assert (block(x, torch.randn(2, 2 * out_channels)) == block.skip(x)).all()


# ---- the norm over channels against a loop ----


def by_loop(norm, x):
    rows = x.movedim(1, -1).reshape(-1, x.shape[1])
    done = []
    for row in rows:
        mean = row.sum() / len(row)
        variance = (row - mean).square().sum() / len(row)
        done.append((row - mean) / (variance + 1e-5).sqrt() * norm.weight + norm.bias)
    return torch.stack(done).reshape(len(x), *x.shape[2:], x.shape[1]).movedim(-1, 1)


@pytest.mark.parametrize("space", [(), (7,), (4, 5)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_equals_the_loop(space, channels_last):
    torch.manual_seed(0)
    norm, x = ChannelNorm(6).double(), torch.randn(3, 6, *space).double()
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    if channels_last and len(space) == 2:
        x = x.contiguous(memory_format=torch.channels_last)
    assert torch.allclose(norm(x), by_loop(norm, x), atol=1e-12)
    # Mutant: moments over the positions of a channel.
    if space:
        wrong = torch.nn.functional.instance_norm(x, None, None, norm.weight, norm.bias)
        assert not torch.allclose(wrong, by_loop(norm, x), atol=1e-2)


def test_keeps_the_memory_format():
    x = torch.randn(2, 4, 5, 6).contiguous(memory_format=torch.channels_last)
    assert ChannelNorm(4)(x).is_contiguous(memory_format=torch.channels_last)


# ---- group normalisation against a plain loop ----


def group_norm_by_loop(x, groups, eps, a, b, length=None):
    """Normalise each example and group in turn, over the first `length` of the last axis; zero beyond."""
    y = torch.zeros_like(x)
    width = x.shape[1] // groups
    for i in range(len(x)):
        stop = x.shape[-1] if length is None else int(length[i])
        for c in range(0, x.shape[1], width):
            part = x[i, c : c + width, ..., :stop]
            y[i, c : c + width, ..., :stop] = (part - part.mean()) / (part.var(unbiased=False) + eps).sqrt()
        for c in range(x.shape[1]):
            y[i, c, ..., :stop] = y[i, c, ..., :stop] * a[i, c] + b[i, c]
    return y


def for_group_norm(*space):
    generator = torch.Generator().manual_seed(0)
    x = 3 + 2 * torch.randn(3, 12, *space, generator=generator, dtype=torch.float64)
    scale, shift = torch.randn(2, 3, 12, generator=generator, dtype=torch.float64)
    return x, scale, shift


@pytest.mark.parametrize("space", [(7,), (4, 5), (1, 2)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_scale_and_shift_equal_the_loop(space, memory_format):
    x, scale, shift = for_group_norm(*space)
    norm = GroupNorm(12, affine=False)
    expected = group_norm_by_loop(x, norm.groups, norm.eps, 1 + scale, shift)
    if len(space) == 2:
        x = x.contiguous(memory_format=memory_format)
    assert torch.allclose(norm(x, scale, shift), expected, atol=1e-12)
    # Mutant: the scale of one example given to another.
    assert not torch.allclose(norm(x, scale.roll(1, 0), shift), expected, atol=1e-2)


@pytest.mark.parametrize("space", [(7,), (4, 7)])
@pytest.mark.parametrize("conditioned", [False, True])
def test_masked_norm_equals_the_loop_over_valid_positions(space, conditioned):
    x, scale, shift = for_group_norm(*space)
    length = torch.tensor([7, 4, 1])
    mask = (torch.arange(7) < length[:, None]).reshape(3, *(1,) * len(space), 7)
    norm = GroupNorm(12, affine=not conditioned).double()
    a, b = (1 + scale, shift) if conditioned else (torch.ones(3, 12), torch.zeros(3, 12))
    given = (scale, shift) if conditioned else ()
    expected = group_norm_by_loop(x, norm.groups, norm.eps, a, b, length)
    assert torch.allclose(norm(x, *given, mask=mask), expected, atol=1e-12)
    # Mutant: mean and variance over the padding too.
    assert not torch.allclose(norm(x, *given) * mask, expected, atol=1e-2)


def test_masked_norm_sums_in_float32():
    """Sums over a map of half precision exceed what it can represent."""
    x = 20 * torch.randn(1, 8, 5000, generator=torch.Generator().manual_seed(0)) + 10
    norm, mask = GroupNorm(8), torch.ones(1, 1, 5000, dtype=torch.bool)
    for dtype, tolerance in ((torch.float16, 0.01), (torch.bfloat16, 0.05)):
        y = norm.to(dtype)(x.to(dtype), mask=mask)
        assert y.dtype == dtype
        assert torch.allclose(y.float(), GroupNorm(8)(x.to(dtype).float()), atol=tolerance)


def test_masked_norm_of_everything_is_the_plain_norm():
    x, scale, shift = for_group_norm(5)
    norm = GroupNorm(12, affine=False)
    everything = norm(x, scale, shift, mask=torch.ones(3, 1, 5, dtype=torch.bool))
    assert torch.allclose(everything, norm(x, scale, shift), atol=1e-12)


def test_an_example_without_valid_positions_stays_finite():
    x, scale, shift = for_group_norm(5)
    y = GroupNorm(12, affine=False)(x, scale, shift, mask=torch.zeros(3, 1, 5, dtype=torch.bool))
    assert (y == 0).all()


@pytest.mark.parametrize("channels", [1, 3, 4, 6, 8, 20, 32, 48, 64, 96, 100, 128, 192, 256, 1024])
def test_groups_are_the_largest_legal_divisor(channels):
    legal = [n for n in range(1, 33) if channels % n == 0 and channels / n >= 4]
    assert group_count(channels) == (legal[-1] if legal else 1)


# ---- a network conditioned on the noise level and the class ----


def closest(features, spacing: float) -> float:
    """Least distance between the features of any two log-SNRs of a grid over [-20, 20]."""
    grid = torch.arange(-20, 20 + spacing / 2, spacing, dtype=torch.float64)
    return float(torch.pdist(features(grid)).min())


@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_noise_levels_are_told_apart(width):
    assert closest(lambda log_snr: log_snr_features(log_snr, width), 0.02) > 0.1


def test_check_catches_features_that_repeat():
    # Without the slow sinusoids every 2 pi of the position looks alike.
    assert closest(lambda log_snr: log_snr_features(log_snr, 128)[:, [0, 64]], 0.02) < 0.01


def test_close_noise_levels_differ_in_float32_too():
    log_snr = torch.linspace(-20, 20, 40001)  # steps of 1e-3
    features = log_snr_features(log_snr, 64)
    assert float((features[1:] - features[:-1]).norm(dim=1).min()) > 0.01


def test_features_equal_the_formula():
    log_snr = torch.tensor([-3.7, 12.25], dtype=torch.float64)
    features = log_snr_features(log_snr, 6)
    for row, value in zip(features, log_snr.tolist(), strict=True):
        position = (value + 20) / 40 * 1000
        angles = [position * 10000 ** (-i / 3) for i in range(3)]
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        assert row.tolist() == pytest.approx(expected, abs=1e-10)


def test_values_beyond_the_ends_are_clipped():
    log_snr = torch.tensor([-math.inf, -25.0, -20.0, 20.0, 25.0, math.inf])
    features = log_snr_features(log_snr, 8)
    assert (features[:3] == features[0]).all() and (features[3:] == features[5]).all()


def test_features_stay_wide_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert log_snr_features(torch.zeros(2), 8).dtype == torch.float32
    assert log_snr_features(torch.zeros(2, dtype=torch.bfloat16), 8).dtype == torch.float32
    assert log_snr_features(torch.zeros(2, dtype=torch.float64), 8).dtype == torch.float64


@pytest.mark.parametrize("log_snr", [-3.0, 0.5, 4.0])
def test_fourier_features_are_means_given_the_noisy_data(log_snr):
    # Under a flat prior x_0 given x is N(x / alpha, 1 / SNR): the means of sin and cos by quadrature.
    x = torch.tensor([[[-0.9, 0.2, 1.1]]], dtype=torch.float64)
    found = fourier_features(x, torch.tensor([log_snr], dtype=torch.float64), [0, 2])
    alpha, width = 1 / math.sqrt(1 + math.exp(-log_snr)), math.exp(-log_snr / 2)
    z = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    weight = torch.exp(-z.square() / 2) / torch.exp(-z.square() / 2).sum()
    for i, value in enumerate(x.flatten().tolist()):
        points = value / alpha + width * z
        means = [(weight * f(2**n * math.pi * points)).sum() for f in (torch.sin, torch.cos) for n in (0, 2)]
        assert found[0, :, i].tolist() == pytest.approx([float(m) for m in means], abs=1e-9)


def test_fourier_features_of_channels_at_the_ends_and_under_autocast():
    x = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        found = fourier_features(x, torch.tensor([-math.inf, 3.0, math.inf]), [3, 7])
    assert found.shape == (3, 8, 5) and found.dtype == torch.float32 and bool(found.isfinite().all())
    assert bool((found[0] == 0).all())  # nothing but noise
    angles = torch.cat([8 * math.pi * x[2:], 128 * math.pi * x[2:]], 1)
    assert torch.allclose(found[2:], torch.cat([angles.sin(), angles.cos()], 1), atol=1e-3)


def test_no_condition_is_the_null_class():
    torch.manual_seed(0)
    embedding, log_snr = ConditionEmbedding(8, 16, 12, num_classes=3), torch.randn(4)
    null = embedding(log_snr, torch.full((4,), 3))
    assert (embedding(log_snr) == null).all()
    for label in range(3):
        assert (embedding(log_snr, torch.full((4,), label)) - null).abs().max() > 0.01


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ConditionEmbedding(7, 8, 8), "even width"),
        (lambda: ConditionEmbedding(8, 8, 8)(torch.zeros(2), torch.zeros(2, dtype=torch.int64)), "without classes"),
        (lambda: ConditionEmbedding(8, 8, 8, 3)(torch.zeros(2), torch.zeros(2)), "integer labels"),
        (lambda: ConditionEmbedding(8, 8, 8, 3)(torch.zeros(2), torch.zeros(2, 1, dtype=torch.int64)), "labels"),
    ],
)
def test_errors_are_one_line(make, words, refuses):
    refuses(ValueError, words, make)


def denoised(net, x):
    return net(x, torch.zeros(len(x), dtype=x.dtype)).square().sum()


def encoded(net, x):
    h = net(x, torch.arange(x.shape[2]) < torch.tensor([[[20]], [[13]]]))
    return (h[0] if isinstance(h, tuple) else h).square().sum()


def energy_and_score(net, x):
    """What a score is trained by: the gradient of a gradient."""
    x = x.requires_grad_()
    energy = net(x)
    (score,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return energy.sum() + score.square().sum()


def masked_energy(net, x):
    return net(x, mask=torch.arange(x.shape[2]) < torch.tensor([[[20]], [[13]]])).square().sum()


def jet(net, x):
    return sum(part.square().sum() for part in net.jet(x, torch.ones_like(x)))


def forced_mel(net, x):
    memory = net.remember(torch.tensor([[3, 1, 2], [2, 2, 1]]))
    decoded = net(x.repeat(1, 1, 7), memory, torch.Generator().manual_seed(1))  # more frames than one block of 64
    return decoded.mean.square().sum() + decoded.stop.square().sum()


def tacotron(**options):
    return Tacotron(TextEncoder(9, 4, channels=8, depth=1, hidden=8), hidden=16, prenet=8, **options)


CONV = {"channels": (8, 8), "group_norm": True}
ATTENTION = {"channels": 8, "attention": "rope2d", "heads": 2, "multipliers": (1, 2)}
#: How it is made, the event, and a number to take the gradient of.
BACKBONES = {
    "unet": (lambda **o: UNet((2, 6, 5), dropout=0.2, **ATTENTION, **o), (2, 6, 5), denoised),
    "dit": (lambda **o: DiT((2, 20), width=16, depth=2, heads=2, dropout=0.2, **o), (2, 20), denoised),
    "mlp": (lambda **o: MLPDenoiser((6,), hidden=16, depth=3, dropout=0.2, **o), (6,), denoised),
    "transformer": (lambda **o: Transformer(4, depth=2, hidden=16, dropout=0.2, **o), (4, 20), encoded),
    "speech": (lambda **o: SpeechEncoder(4, channels=8, depth=2, hidden=16, dropout=0.2, **o), (4, 20), encoded),
    "tacotron": (tacotron, (4, 20), forced_mel),
    "energy mlp": (lambda **o: EnergyMLP((6,), hidden=(16, 16), **o), (6,), energy_and_score),
    "energy mlp jet": (lambda **o: EnergyMLP((6,), hidden=(16, 16), **o), (6,), jet),
    "energy conv": (lambda **o: EnergyConv((2, 6, 5), **CONV, **o), (2, 6, 5), energy_and_score),
    "energy conv masked": (lambda **o: EnergyConv((2, 20), **CONV, **o), (2, 20), masked_energy),
    "energy conv jet": (lambda **o: EnergyConv((2, 6, 5), channels=(8, 8), **o), (2, 6, 5), jet),
}


def with_gradients(name: str, *, checkpointing: bool, seed: int = 3) -> tuple[list[torch.Tensor], int]:
    """The number and its gradients in training, with dropout, and how many numbers the forward pass stored."""
    make, shape, use = BACKBONES[name]
    torch.manual_seed(0)
    net, x = make(checkpointing=checkpointing).double().train(), torch.randn(2, *shape, dtype=torch.float64)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    stored = 0

    def count(saved):
        nonlocal stored
        stored += saved.numel() if saved.requires_grad and not isinstance(saved, torch.nn.Parameter) else 0
        return saved

    torch.manual_seed(seed)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
        y = use(net, x)
    y.backward()
    return [y.detach(), *(p.grad for p in net.parameters() if p.grad is not None)], stored


@pytest.mark.parametrize("name", BACKBONES)
def test_checkpointing_stores_less_and_changes_no_gradient(name):
    (plain, whole), (again, less) = (with_gradients(name, checkpointing=on) for on in (False, True))
    assert len(plain) == len(again) > 3 and any(bool(g.any()) for g in plain[1:])
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * float(a.abs().max()))
    assert less <= whole if BACKBONES[name][2] is energy_and_score else less < 0.6 * whole
