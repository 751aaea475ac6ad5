"""The diffusion transformer: patches, blocks that begin as the identity, positions, masks, sizes, memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from genmodels.nn import ATTENTION, DiT, TokenBlock, dit, patchify, unpatchify
from genmodels.nn.attention import Attention, Rotary, Rotary2d
from genmodels.nn.attention_block import Site, make_mechanism
from tests.nn.inputs import check_bf16_loss, inputs

DOUBLE = torch.float64
EVENTS = [(1, 8, 8), (3, 7, 9), (2, 5, 4), (4, 13), (2, 1)]
SMALL = {"width": 16, "depth": 2, "heads": 2}


def build(event_shape, num_classes=None, *, randomised=True, **options):
    """A small network in float64; randomised without any of its zeros."""
    torch.manual_seed(0)
    net = DiT(event_shape, num_classes, **{**SMALL, **options}).to(DOUBLE)
    return randomise(net) if randomised else net


def randomise(net: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            scale = 1 / math.sqrt(p.shape[-1]) if p.dim() > 1 else 0.3
            p.copy_(p + scale * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return net


# ---- patches ---------------------------------------------------------------------------------------------------------


def by_loop(x, patch):
    """Channel (c, i, j) of patch (a, b) is x[c, a p + i, b p + j], 0 beyond the border."""
    batch, channels, *space = x.shape
    space = [1, *space] if len(space) == 1 else space
    tall = patch if x.dim() == 4 else 1
    x = x.reshape(batch, channels, *space)
    grid = [-(-space[0] // tall), -(-space[1] // patch)]
    y = x.new_zeros(batch, channels * tall * patch, *grid)
    for c in range(channels):
        for row in range(space[0]):
            for column in range(space[1]):
                place = (c * tall + row % tall) * patch + column % patch
                y[:, place, row // tall, column // patch] = x[:, c, row, column]
    return y


@pytest.mark.parametrize("patch", [1, 2, 3])
@pytest.mark.parametrize("event_shape", EVENTS)
def test_patchify_against_a_loop_and_its_inverse(event_shape, patch):
    x, _, _ = inputs(event_shape)
    y = patchify(x, patch)
    assert torch.equal(y.reshape(by_loop(x, patch).shape), by_loop(x, patch))
    assert torch.equal(unpatchify(y, patch, event_shape[1:]), x)


@pytest.mark.parametrize("event_shape", [(1, 8, 8), (2, 8)])
def test_no_example_at_all(event_shape):
    tokens = patchify(torch.zeros(0, *event_shape), 2)
    assert tokens.shape[1:] == patchify(torch.zeros(1, *event_shape), 2).shape[1:] and len(tokens) == 0
    found = DiT(event_shape, width=16, depth=1, heads=2)(torch.zeros(0, *event_shape), torch.zeros(0))
    assert found.shape == (0, *event_shape)


def test_mutant_of_patchify_is_caught(monkeypatch):
    right = patchify
    monkeypatch.setitem(globals(), "patchify", lambda x, patch: right(x.flip(-1), patch).flip(-1))
    with pytest.raises(AssertionError):
        test_patchify_against_a_loop_and_its_inverse((3, 7, 9), 2)


# ---- at the start ----------------------------------------------------------------------------------------------------


def changes_at_the_start(block: nn.Module) -> float:
    """How far a block with random weights but a modulation of zero is from the identity."""
    weights = [p.clone() for p in block.modulation.parameters()]
    randomise(block)
    for p, weight in zip(block.modulation.parameters(), weights, strict=True):
        p.data.copy_(weight)
    x, c = torch.randn(2, 2, 6, 16, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    return float((block(x, c[:, 0], space=(2, 3)) - x).detach().abs().max())


def test_blocks_are_the_identity_and_the_output_is_zero():
    net = build((1, 6, 8), 3, randomised=False)
    assert (net(*inputs((1, 6, 8), num_classes=3)) == 0).all()
    assert all(changes_at_the_start(block) == 0 for block in net.transformer.blocks)


def test_mutant_with_an_open_gate_is_caught(monkeypatch):
    monkeypatch.setattr(TokenBlock, "_add", lambda self, x, gate, y: x + (1 + gate) * y)
    assert changes_at_the_start(build((1, 6, 8), randomised=False).transformer.blocks[0]) > 0.1


def block_by_hand(block, x, c):
    """The equation of the docstring, with torch's own parts."""
    s_1, b_1, g_1, s_2, b_2, g_2 = (c.sigmoid() * c @ block.modulation.weight.T + block.modulation.bias).split(16, 1)

    def normed(x, scale, shift):
        y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
        return (1 + scale[:, None]) * y + shift[:, None]

    h = x + g_1[:, None] * block.attention(normed(x, s_1, b_1))[0]
    inside = nn.GELU("tanh")(normed(h, s_2, b_2) @ block.enter.weight.T + block.enter.bias)
    return h + g_2[:, None] * (inside @ block.leave.weight.T + block.leave.bias)


def error_of_the_block():
    block = randomise(TokenBlock(16, Attention(16, 2), condition=5, hidden=24).to(DOUBLE))
    generator = torch.Generator().manual_seed(4)
    x, c = (torch.randn(shape, generator=generator, dtype=DOUBLE) for shape in ((2, 6, 16), (2, 5)))
    return float((block(x, c) - block_by_hand(block, x, c)).detach().abs().max())


def test_the_block_against_its_equation():
    assert error_of_the_block() < 1e-12


def test_mutant_of_the_norm_is_caught(monkeypatch):
    right = dit.TokenNorm.forward
    monkeypatch.setattr(dit.TokenNorm, "forward", lambda self, x, scale, shift: right(self, x, scale - 1, shift))
    assert error_of_the_block() > 1e-2


def test_a_block_without_condition_has_norms_of_its_own():
    block = randomise(TokenBlock(16, None, condition=0, hidden=24).to(DOUBLE))
    x = torch.randn(2, 6, 16, dtype=DOUBLE, generator=torch.Generator().manual_seed(4))
    normed = nn.functional.layer_norm(x, (16,), block.norm_2.weight, block.norm_2.bias, 1e-6)
    assert torch.allclose(block(x), x + block.leave(nn.GELU()(block.enter(normed))), atol=1e-12)


# ---- positions -------------------------------------------------------------------------------------------------------


def spread_of_logits(position, space):
    """Largest difference between logits of equal contents at equal offsets (dr, dc)."""
    length = math.prod(space)
    content = torch.randn(2, 1, 2, 1, 8, dtype=DOUBLE, generator=torch.Generator().manual_seed(5))
    q, k = content.expand(2, 1, 2, length, 8)
    q, k = position.rotate(q, k, 0, 0, space)
    logits, seen = q @ k.mT, {}
    for i in range(length):
        for j in range(length):
            offset = (j // space[1] - i // space[1], j % space[1] - i % space[1])
            seen.setdefault(offset, []).append(logits[0, :, i, j])
    return max(float((torch.stack(values) - values[0]).abs().max()) for values in seen.values())


class Sheared(Rotary2d):
    """The columns of lower rows are wider."""

    def _turn(self, values, y, x):
        return super()._turn(values, y, x * (1 + y))


def test_logits_depend_on_the_offset_alone():
    position = build((1, 6, 8)).transformer.blocks[0].attention.position
    assert isinstance(position, Rotary2d) and spread_of_logits(position, (3, 4)) < 1e-12
    assert spread_of_logits(Sheared(16, 2), (3, 4)) > 1e-2
    position = build((2, 9)).transformer.blocks[0].attention.position
    assert isinstance(position, Rotary) and spread_of_logits(position, (1, 7)) < 1e-12


# ---- every attention, masks, any size --------------------------------------------------------------------------------

KINDS = [(name, dims) for name, kind in ATTENTION.items() for dims in kind.dims]
MASKED = {1: ((2, 13), (13, 6, 5, 1)), 2: ((2, 5, 9), (9, 4, 3, 1))}


def effect_of_padding(net, event_shape, lengths) -> float:
    """The largest effect of what stands outside the mask and of the padding's length; inf for a NaN."""
    x, log_snr, _ = inputs(event_shape, batch=len(lengths))
    mask = (torch.arange(event_shape[-1]) < torch.tensor(lengths)[:, None])[:, None]
    outside = ~mask.reshape(len(x), *(1,) * (x.dim() - 2), -1)
    with torch.no_grad():
        y = net(x.masked_fill(outside, math.nan), log_snr, mask=mask)
        alone = [net(x[i : i + 1, ..., :n], log_snr[i : i + 1]) for i, n in enumerate(lengths)]
    errors = [(y[i, ..., :n] - alone[i][0]).abs().max() for i, n in enumerate(lengths)]
    errors.append(y.masked_fill(~outside, 0).abs().max())
    return float(torch.stack(errors).nan_to_num(math.inf).max())


@pytest.mark.parametrize("attention, dims", KINDS)
def test_every_attention_with_padding_and_with_gradients(attention, dims):
    event_shape, lengths = MASKED[dims]
    net = build(event_shape, attention=attention)
    if attention == "swin2d":
        with pytest.raises(ValueError, match="resampled for the size of the map"):
            effect_of_padding(net, event_shape, lengths)
    else:
        assert effect_of_padding(net, event_shape, lengths) < 1e-9
    net(*inputs(event_shape)).square().sum().backward()
    unreached = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-9]
    # A bias of the keys cancels in a softmax without positions that turn them.
    assert [name for name in unreached if "project_k.bias" not in name] == []


def test_mutants_of_the_mask_are_caught(monkeypatch):
    event_shape, lengths = MASKED[1]
    right = DiT._valid
    with monkeypatch.context() as patch:
        patch.setattr(DiT, "_valid", lambda self, mask, grid: None)
        assert effect_of_padding(build(event_shape), event_shape, lengths) > 1e-3
    with monkeypatch.context() as patch:  # a patch that is half padded is hidden
        patch.setattr(DiT, "_valid", lambda self, mask, grid: right(
            self, None if mask is None else mask & mask.roll(-1, -1), grid))
        assert effect_of_padding(build(event_shape), event_shape, lengths) > 1e-3
    net = build((2, 6, 8), attention="t5", patch=1)
    net.by_row = True  # a map as a sequence row by row: distances change with the padding
    assert effect_of_padding(net, (2, 6, 8), (8, 3)) > 1e-3


@pytest.mark.parametrize("event_shape", EVENTS)
def test_any_size_and_an_example_by_itself(event_shape):
    net = build(event_shape, 3)
    x, log_snr, cond = inputs(event_shape, batch=4, num_classes=3)
    together = net(x, log_snr, cond)
    alone = torch.cat([net(x[i : i + 1], log_snr[i : i + 1], cond[i : i + 1]) for i in range(4)])
    assert together.shape == x.shape and torch.allclose(together, alone, atol=1e-10)
    other, _, _ = inputs((event_shape[0], *(n + 3 for n in event_shape[1:])), batch=4)
    assert net(other, log_snr, cond).shape == other.shape


def test_noise_level_and_class_matter_and_none_is_the_null_class():
    net = build((1, 8, 8), 3)
    x, log_snr, cond = inputs((1, 8, 8), num_classes=3)
    y = net(x, log_snr, cond)
    assert (y - net(x, log_snr + 1, cond)).abs().max() > 1e-3 < (y - net(x, log_snr, (cond + 1) % 3)).abs().max()
    assert torch.equal(net(x, log_snr), net(x, log_snr, torch.full((2,), 3)))


def test_channels_that_come_in_and_channels_that_go_out():
    net = build((3, 8, 6), double_output=True, extra_channels=2)
    x, log_snr, _ = inputs((5, 8, 6))
    y = net(x, log_snr)
    assert y.shape == (2, 6, 8, 6) and (y - net(x * torch.tensor([1, 1, 1, 1, 0.0])[:, None, None], log_snr)).any()


# ---- options of memory and speed -------------------------------------------------------------------------------------


def gradients(net, *arguments):
    net.zero_grad()
    torch.manual_seed(3)
    y = net(*arguments)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in net.parameters())]


@pytest.mark.parametrize("event_shape, masked", [((3, 7, 10), False), ((2, 13), True)])
def test_traces_without_a_graph_break(event_shape, masked):
    net, arguments = build(event_shape, 3), inputs(event_shape, num_classes=3)
    mask = (torch.arange(13) < torch.tensor([[13], [6]]))[:, None] if masked else None
    traced = torch.compile(net, fullgraph=True, backend="eager")
    assert torch.allclose(traced(*arguments, mask), net(*arguments, mask), atol=1e-12)


@pytest.mark.parametrize("event_shape", [(3, 15, 16), (8, 37)])
def test_bf16_loss_is_within_one_per_cent(event_shape):
    check_bf16_loss(build(event_shape, width=32), event_shape)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_blocks_are_units_of_fully_sharded_training(tmp_path):
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        whole, sharded, arguments = build((1, 8, 8), 3), build((1, 8, 8), 3), inputs((1, 8, 8), num_classes=3)
        for block in sharded.transformer.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        expected = gradients(whole, *arguments)
        sharded(*arguments).square().sum().backward()
        found = [p.grad.full_tensor() for p in sharded.parameters()]
    finally:
        torch.distributed.destroy_process_group()
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(expected[1:], found, strict=True))


# ---- sizes -----------------------------------------------------------------------------------------------------------

# ---- places ----------------------------------------------------------------------------------------------------------


def spread_over_places(**options) -> float:
    """How unlike the outputs at different places of a constant map are."""
    net = build((1, 8, 6), **options)
    y = patchify(net(torch.ones(1, 1, 8, 6, dtype=DOUBLE), torch.zeros(1, dtype=DOUBLE)), 2)
    return float((y - y[..., :1, :1]).detach().abs().max())


@pytest.mark.parametrize("attention", ["rope2d", "plain", "rope"])  # the last takes the map column by column
def test_places_are_told_apart_by_their_vectors_alone(attention):
    assert spread_over_places(attention=attention) > 0.01
    assert spread_over_places(attention=attention, places=False) < 1e-12


@pytest.mark.parametrize("attention", ["rope2d", "rope"])
def test_each_token_has_the_vector_of_its_place(attention):
    """By the derivative of the output, of a network whose tokens do not see each other, at one place."""
    net = build((1, 8, 6), attention=attention)
    for block in net.transformer.blocks:
        nn.init.zeros_(block.attention.project_out.weight)
    x = torch.randn(1, 1, 8, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))
    y = net(x, torch.zeros(1, dtype=DOUBLE))
    gradient = torch.autograd.grad(y[0, 0, 4:6, 2:4].sum(), net.places.table)[0].abs().sum(0)
    assert gradient[2, 1] > 0 and gradient.count_nonzero() == 1


def test_places_of_another_size_are_those_of_the_first_rows_and_columns_and_the_last_go_on():
    places = build((1, 8, 8)).places
    for height, width in ((4, 4), (2, 3), (6, 5)):
        found = places((height, width))[0]
        for row in range(height):
            for column in range(width):
                assert torch.equal(found[:, row, column], places.table[:, min(row, 3), min(column, 3)])


def test_a_checkpoint_without_places_is_the_same_network():
    before, now = build((1, 8, 8), places=False), build((1, 8, 8))
    assert "places.table" in now.state_dict() and "places.table" not in before.state_dict()
    now.load_state_dict(before.state_dict())
    x, log_snr = torch.randn(2, 1, 8, 8, dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE)
    assert torch.equal(now(x, log_snr), before(x, log_snr))


#: Millions of parameters, latents of 32x32x4, patches of 2, 1,000 classes, learned variances: Peebles and Xie, table 4.
PUBLISHED = {"S": 33, "B": 130, "L": 458, "XL": 675}


def excess(size, **options) -> float:
    """Parameters over the published number, minus one."""
    with torch.device("meta"):
        net = DiT((4, 32, 32), 1000, double_output=True, size=size, **options)
    return sum(p.numel() for p in net.parameters()) / (PUBLISHED[size] * 1e6) - 1


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes_have_the_published_numbers_of_parameters(size):
    assert abs(excess(size)) < 0.02


def test_mutants_of_the_size_are_caught():
    for wrong in ({"expansion": 3}, {"depth": 11}, {"attention": "none"}, {"width": 408}):
        assert abs(excess("S", **wrong)) > 0.02


@pytest.mark.parametrize("make, words", [
    (lambda: DiT((2,)), r"takes events \(C, T\) or \(C, H, W\), got \(2,\): use the MLP"),
    (lambda: DiT((1, 8, 8), size="M"), "size must be one of S, B, L, XL, got 'M'"),
    (lambda: DiT((1, 8, 8), patch=0), "patch must be at least 1, got 0"),
    (lambda: DiT((1, 8, 8), depth=0), "depth must be at least 1, got 0"),
    (lambda: DiT((1, 8, 8), width=-1), "width must be at least 1, got -1"),
    (lambda: DiT((1, 8, 8), heads=3), "heads = 3 does not divide the width 128"),
    (lambda: DiT((2, 8), attention="rope2d"), "'rope2d' is not one of .* for sequences"),
    (lambda: build((1, 8, 8))(torch.zeros(2, 3, 8, 8), torch.zeros(2)), "built for 1 channels and 2 spatial"),
    (lambda: build((1, 8))(*inputs((1, 8), 2), torch.ones(2, 8).bool()), r"bool of shape \(B, 1, T\)"),
    (lambda: make_mechanism("rope", 8, 3, Site(1)), "heads = 3 does not divide the width 8"),
])  # fmt: skip
def test_errors_are_one_line(make, words, refuses):
    refuses(ValueError, words, make)
