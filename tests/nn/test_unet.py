"""The U-Net: sizes, masks, gradients, precision, compilation, parameter counts."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from genmodels.energy import Energy
from genmodels.nn import GroupNorm, SpatialAttention, UNet, Upsample
from genmodels.nn import unet as unet_module
from genmodels.nn.energy_nets import UNetEnergy
from tests.nn.inputs import check_bf16_loss, inputs

SQUARES = [(n, n) for n in (7, 8, 15, 28, 32, 33)]
SPACES = [*SQUARES, (7, 12), (9, 16), (5, 33), (37,)]
TINY = {"channels": 8, "multipliers": (1, 2, 2), "blocks": 1, "heads": 2}


def build(event_shape, num_classes=None, *, randomised=True, **options):
    """A small network in float64, without any of its zeros unless asked for them."""
    torch.manual_seed(0)
    net = UNet(event_shape, num_classes, **{**TINY, **options}).double()
    return randomise(net) if randomised else net


def randomise(net: nn.Module) -> nn.Module:
    """Every zero-initialised parameter drawn as a default layer would draw it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            if (parameter == 0).all():
                bound = 1 / math.sqrt(parameter[0].numel()) if parameter.dim() > 1 else 0.1
                parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
    return net


def parameters(net) -> int:
    return sum(p.numel() for p in net.parameters())


# ---- any size, zero at the start, gradients everywhere ---------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("space", SPACES)
def test_zero_at_the_start_for_every_size(space, channels):
    net = build((channels, *space), randomised=False)
    x, log_snr, _ = inputs((channels, *space))
    y = net(x, log_snr)
    assert y.shape == x.shape and y.dtype == x.dtype and (y == 0).all()


def unreached(net, event_shape, num_classes=None) -> list[str]:
    """Names of the parameters that no gradient reaches."""
    net.zero_grad()
    net(*inputs(event_shape, num_classes=num_classes)).square().sum().backward()
    return [name for name, p in net.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-9]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("space", SPACES)
def test_gradient_reaches_every_parameter(space, channels):
    assert unreached(build((channels, *space), 2), (channels, *space), 2) == []


def test_check_catches_a_parameter_without_effect():
    net = build((1, 8, 8))
    net.down[0][0].block.conv_2.weight.data.zero_()
    found = unreached(net, (1, 8, 8))
    assert "down.0.0.block.conv_1.weight" in found and "head.weight" not in found
    assert "stem.weight" in unreached(build((1, 8, 8), randomised=False), (1, 8, 8))


@pytest.mark.parametrize("size", [7, 15, 33])
def test_check_catches_a_resize_by_two(size, monkeypatch):
    def by_two(self, x, size, mask=None):
        return self.conv(nn.functional.interpolate(x, scale_factor=2))

    monkeypatch.setattr(Upsample, "forward", by_two)
    with pytest.raises(RuntimeError, match="[Ss]izes of tensors must match"):
        test_zero_at_the_start_for_every_size((size, size), 1)


def test_takes_other_sizes_than_it_was_built_for():
    net = build((1, 8, 8))
    for space in ((11, 13), (16, 4), (8, 9)):
        x, log_snr, _ = inputs((1, *space))
        assert net(x, log_snr).shape == x.shape


# ---- each example for itself -----------------------------------------------------------------------------------------


def depends_on_the_batch(net, event_shape) -> bool:
    x, log_snr, cond = inputs(event_shape, batch=4, num_classes=3)
    together = net(x, log_snr, cond)
    alone = torch.cat([net(x[i : i + 1], log_snr[i : i + 1], cond[i : i + 1]) for i in range(4)])
    return not torch.allclose(together, alone, atol=1e-10)


@pytest.mark.parametrize("event_shape", [(1, 8, 8), (3, 7, 9), (4, 13)])
def test_an_example_does_not_depend_on_its_batch(event_shape):
    assert not depends_on_the_batch(build(event_shape, 3), event_shape)


def test_check_catches_a_norm_over_the_batch(monkeypatch):
    monkeypatch.setattr(GroupNorm, "forward", lambda self, x, *given, mask=None: (x - x.mean(0)) / (x.std() + 1))
    assert depends_on_the_batch(build((1, 8, 8), 3), (1, 8, 8))


def test_noise_level_and_class_matter_and_none_is_the_null_class():
    net = build((1, 8, 8), 3)
    x, log_snr, cond = inputs((1, 8, 8), num_classes=3)
    y = net(x, log_snr, cond)
    assert (y - net(x, log_snr + 1, cond)).abs().max() > 1e-3
    assert (y - net(x, log_snr, (cond + 1) % 3)).abs().max() > 1e-3
    assert (net(x, log_snr) == net(x, log_snr, torch.full((2,), 3))).all()


def test_infinite_log_snr_is_the_end_of_the_range():
    net = build((1, 8, 8))
    x, _, _ = inputs((1, 8, 8))
    ends = net(x, torch.tensor([-math.inf, math.inf], dtype=torch.float64))
    assert torch.isfinite(ends).all() and (ends == net(x, torch.tensor([-20.0, 20.0], dtype=torch.float64))).all()


# ---- masks -----------------------------------------------------------------------------------------------------------


def mask_of(lengths, size):
    return (torch.arange(size) < torch.tensor(lengths)[:, None])[:, None]


def padding_matters(net, event_shape, lengths) -> bool:
    """Whether a padded and masked example differs from the example alone, or its padding shows, or is not zero."""
    x, log_snr, _ = inputs(event_shape, batch=len(lengths))
    mask = mask_of(lengths, event_shape[-1])
    dirty = x.masked_fill(~mask.reshape(len(x), *(1,) * (x.dim() - 2), -1), math.nan)
    y = net(dirty, log_snr, mask=mask)
    for i, n in enumerate(lengths):
        alone = net(x[i : i + 1, ..., :n], log_snr[i : i + 1])
        if not torch.allclose(y[i : i + 1, ..., :n], alone, atol=1e-9) or not (y[i, ..., n:] == 0).all():
            return True
    return False


MASKED = [
    ((5, 37), (37, 20, 23, 4)),
    ((1, 37), (36, 35, 34, 33)),
    ((1, 8, 21), (21, 16, 13, 6)),
    ((2, 6, 16), (16, 8, 5)),
]


@pytest.mark.parametrize("fourier", [(), (1, 3)])
@pytest.mark.parametrize("event_shape, lengths", MASKED)
def test_padding_has_no_influence(event_shape, lengths, fourier):
    assert not padding_matters(build(event_shape, fourier=fourier), event_shape, lengths)


@pytest.mark.parametrize("fourier", [(), (1, 3)])
def test_gradients_of_dirty_padding_are_clean(fourier):
    net = build((2, 16), fourier=fourier)
    x, log_snr, _ = inputs((2, 16))
    x = x.masked_fill(~mask_of((9, 16), 16), math.nan).requires_grad_()
    net(x, log_snr, mask=mask_of((9, 16), 16)).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())
    assert (x.grad[0, :, 9:] == 0).all() and (x.grad[0, :, :9] != 0).any()


@pytest.mark.parametrize("event_shape, lengths", MASKED)
def test_check_catches_a_norm_over_padding(event_shape, lengths, monkeypatch):
    right = GroupNorm.forward

    def over_padding(self, x, scale=None, shift=None, mask=None):
        y = right(self, x, scale, shift)
        return y if mask is None else y * mask

    monkeypatch.setattr(GroupNorm, "forward", over_padding)
    assert padding_matters(build(event_shape), event_shape, lengths)


def test_check_catches_a_convolution_that_sees_padding(monkeypatch):
    monkeypatch.setattr("genmodels.nn.blocks.hide", lambda x, mask: x)
    assert padding_matters(build((5, 37)), (5, 37), (37, 20, 23, 4))


def test_check_catches_a_wrong_mask_of_the_coarse_levels(monkeypatch):
    right = unet_module._masks

    def rounded_down(mask, dims, levels):
        masks = right(mask, dims, levels)
        return masks if mask is None else [masks[0], *(m & m.roll(-1, -1) for m in masks[1:])]

    monkeypatch.setattr(unet_module, "_masks", rounded_down)
    assert padding_matters(build((5, 37)), (5, 37), (37, 20, 23, 4))


# ---- options that change speed or memory, not numbers ----------------------------------------------------------------


def gradients(net, event_shape, **given):
    net.zero_grad()
    torch.manual_seed(3)
    y = net(*inputs(event_shape), **given)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in net.parameters())]


@pytest.mark.parametrize("event_shape", [(1, 8, 8), (3, 7, 9), (2, 13)])
def test_the_memory_format_changes_nothing(event_shape):
    plain, other = (build(event_shape, dropout=0.2, channels_last=on) for on in (False, True))
    for a, b in zip(gradients(plain, event_shape), gradients(other, event_shape), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-9 * max(1.0, float(a.abs().max())))


def test_input_is_not_modified():
    net = build((1, 8, 8))
    x, log_snr, _ = inputs((1, 8, 8))
    before = x.clone()
    net(x, log_snr)
    assert (x == before).all() and x._version == 0 and log_snr._version == 0


@pytest.mark.parametrize("event_shape, masked", [((3, 7, 10), False), ((2, 13), True)])
def test_traces_without_a_graph_break(event_shape, masked):
    net = build(event_shape, 3, multipliers=(1, 2))
    arguments = inputs(event_shape, num_classes=3)
    mask = mask_of((13, 6), 13) if masked else None
    traced = torch.compile(net, fullgraph=True, backend="eager")
    assert torch.allclose(traced(*arguments, mask), net(*arguments, mask), atol=1e-12)


@pytest.mark.slow
def test_compiled_equals_eager():
    event_shape = (1, 8, 8)
    net = build(event_shape, 3, multipliers=(1, 2)).float()
    compiled = torch.compile(copy.deepcopy(net), fullgraph=True)
    arguments = inputs(event_shape, num_classes=3, dtype=torch.float32)
    results = []
    for network in (net, compiled):
        y = network(*arguments)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in network.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(a.abs().max()))


@pytest.mark.parametrize("event_shape, options", [
    ((1, 8, 8), {"channels": 32, "multipliers": (1, 2)}), ((3, 15, 16), {"channels": 16}), ((8, 37), {"channels": 16}),
])  # fmt: skip
def test_bf16_loss_is_within_one_per_cent(event_shape, options):
    check_bf16_loss(build(event_shape, **options), event_shape)


# ---- sizes of the published settings ---------------------------------------------------------------------------------


def test_cifar10_has_the_published_number_of_parameters():
    options = {"channels": 128, "multipliers": (1, 2, 2, 2), "attention_at": [16]}
    assert abs(parameters(UNet((3, 32, 32), **options)) / 35_746_307 - 1) < 0.02
    # Mutants: a residual block too many, attention somewhere else as well.
    for wrong in ({"blocks": 3}, {"attention_at": [16, 8]}):
        assert abs(parameters(UNet((3, 32, 32), **{**options, **wrong})) / 35_746_307 - 1) > 0.02


def test_the_digits_network_is_small():
    assert parameters(UNet((1, 8, 8), 10, channels=32, multipliers=(1, 2), blocks=1, attention_at=[4])) <= 800_000


def attending(net) -> list[str]:
    return [name for name, module in net.named_modules() if isinstance(module, SpatialAttention)]


@pytest.mark.parametrize(
    "event_shape, options, down, up",
    [
        ((1, 28, 28), {}, [2], [2]),
        ((1, 28, 28), {"attention_at": [14]}, [1], [1]),
        ((1, 33, 20), {"attention_at": (17, 9)}, [1, 2], [1, 2]),
        ((1, 28), {"attention_at": []}, [], []),
    ],
)
def test_attention_stands_where_it_was_asked_for(event_shape, options, down, up):
    names = attending(UNet(event_shape, **{**TINY, **options}))
    assert "middle.0.attention" in names
    assert sorted(int(n.split(".")[1]) for n in names if n.startswith("down")) == down
    # The first stage on the way up is the lowest of the three levels; it has one block more.
    assert sorted({2 - int(n.split(".")[1]) for n in names if n.startswith("up")}) == up
    assert len(names) == 1 + len(down) + 2 * len(up)


def test_attention_can_be_left_out():
    assert attending(UNet((1, 8, 8), **TINY, attention="none")) == []


def test_double_output_doubles_the_channels():
    x, log_snr, _ = inputs((3, 8, 8))
    assert build((3, 8, 8), double_output=True)(x, log_snr).shape == (2, 6, 8, 8)


def test_extra_channels_come_in_and_do_not_go_out():
    x, log_snr, _ = inputs((3, 8, 8))
    net = build((3, 8, 8), extra_channels=3)
    torch.nn.init.normal_(net.head.weight)
    other = torch.cat([x, torch.randn_like(x)], 1)
    y = net(other, log_snr)
    assert y.shape == x.shape and not torch.allclose(y, net(torch.cat([x, torch.zeros_like(x)], 1), log_snr))


def test_fourier_features_come_in_with_the_event_and_tell_near_levels_apart():
    x, _, _ = inputs((3, 8, 8))
    net, log_snr = build((3, 8, 8), fourier=[2, 5]), torch.full((2,), 12.0, dtype=torch.float64)
    assert net.stem.in_channels == 3 * (1 + 2 * 2) and net(x, log_snr).shape == x.shape
    with torch.no_grad():  # a shift by 2^-6 turns the finest features by half a period
        net.stem.weight[:, :3] = 0
        moved = (net(x + 2.0**-6, log_snr) - net(x, log_snr)).abs().mean()
        whole = (net(x + 2.0**-1, log_snr) - net(x, log_snr)).abs().mean()  # and by 2^-1 not at all
    assert float(moved) > 100 * float(whole)


@pytest.mark.parametrize("event_shape", [(3, 8, 8), (2, 16)])
def test_fourier_features_are_of_the_noisy_data_whatever_the_scale_of_the_input(event_shape):
    x, log_snr, _ = inputs(event_shape)
    net, r = build(event_shape, fourier=[2, 5]).double(), torch.tensor([0.7, 1.3], dtype=torch.float64)
    x, log_snr, scaled = x.double(), log_snr.double() + 6, x.double() * r.view(2, *[1] * len(event_shape))
    with torch.no_grad():
        net.stem.weight[:, : event_shape[0]] = 0
    torch.testing.assert_close(net(scaled, log_snr, scale=r), net(x, log_snr))
    assert not torch.allclose(net(scaled, log_snr), net(x, log_snr), atol=1e-3)
    assert net.takes_scale and not build(event_shape, fourier=[2], fourier_of="input").takes_scale
    assert not build(event_shape).takes_scale


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: UNet((1, 3, 8)), "3x8 are too small for 3 levels: give multipliers with at most 2 entries"),
        (lambda: UNet((1, 1)), "size 1 are too small for 3 levels: give multipliers with at most 1 entries"),
        (lambda: UNet((2,)), "use the MLP"),
        (lambda: UNet((1, 8, 8), channels=6, heads=5), "heads = 5 does not divide 12 channels: use one of 1, 2, 3, 4"),
        (lambda: UNet((1, 8, 8), channels=7), "channels = 7 must be even"),
        (lambda: UNet((1, 8, 8), channels=0), "must be at least 1"),
        (lambda: UNet((1, 8, 8), condition=-1), "condition must be at least 1, got -1"),
        (lambda: UNet((1, 8, 8), multipliers=[]), "must be at least 1"),
        (lambda: UNet((1, 8, 8), attention="relative"), "'relative' is not one of none, plain"),
        (lambda: UNet((1, 28, 28), attention_at=[16]), "attention_at = 16 .* choose from 28, 14, 7"),
        (lambda: build((1, 8, 8))(torch.zeros(2, 1, 3, 8), torch.zeros(2)), "too small for 3 levels"),
        (lambda: build((1, 8, 8))(torch.zeros(2, 3, 8, 8), torch.zeros(2)), r"built for 1 channels .* \(3, 8, 8\)"),
        (lambda: build((1, 8))(*inputs((1, 8)), mask=torch.ones(2, 1, 8)), "mask must be bool"),
        (lambda: build((1, 8))(*inputs((1, 8)), mask=torch.ones(2, 8, dtype=torch.bool)), r"shape \(B, 1, T\)"),
        (lambda: build((1, 8))(*inputs((1, 8), num_classes=3)), "without classes"),
    ],
)
def test_errors_are_one_line(make, words, refuses):
    refuses(ValueError, words, make)


@pytest.mark.parametrize("size, levels", [(1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4)])
def test_the_named_number_of_levels_is_the_largest_legal_one(size, levels):
    options = {"channels": 8, "blocks": 1, "heads": 2}
    net = UNet((1, size, size), multipliers=(1,) * levels, **options)
    assert net(torch.randn(2, 1, size, size), torch.zeros(2)).shape == (2, 1, size, size)
    with pytest.raises(ValueError, match=f"at most {levels} entries"):
        UNet((1, size, size), multipliers=(1,) * (levels + 1), **options)


def test_an_empty_batch_has_an_empty_map():
    assert UNet((1, 8, 8), channels=8)(torch.zeros(0, 1, 8, 8), torch.zeros(0)).shape == (0, 1, 8, 8)
    energy = Energy(UNetEnergy((1, 8, 8), channels=8))
    assert [value.shape for value in energy.energy_and_score(torch.zeros(0, 1, 8, 8))] == [(0,), (0, 1, 8, 8)]


def test_attention_may_be_placed_by_an_iterator():
    network = UNet((1, 8, 8), channels=8, attention_at=iter([8]))
    expected = UNet((1, 8, 8), channels=8, attention_at=[8])
    assert [name for name, _ in network.named_parameters()] == [name for name, _ in expected.named_parameters()]
