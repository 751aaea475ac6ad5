"""Blocks of attention in backbones: one table of all kinds, on maps and on sequences."""

from __future__ import annotations

import copy
import math
from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from genmodels.nn import ATTENTION, AttentionBlock, AttentionKind, ConvNet, SpatialAttention, UNet, attention
from genmodels.nn.attention import Attention
from genmodels.nn.attention_block import (
    CAUSAL,
    AbsoluteAttention,
    Site,
    make_attention,
    make_mechanism,
)
from genmodels.nn.energy_nets import UNetEnergy
from genmodels.verification.attention_reference import reference_attention

KINDS = [name for name in ATTENTION if name != "none"]
CASES = [(name, dims) for name in KINDS for dims in ATTENTION[name].dims]
SPACES = {1: (7,), 2: (3, 5)}
#: Kinds that are the core with some position, so that the double loop knows them.
CORE = [(name, dims) for name, dims in CASES if name not in (
    "plain", "absolute", "nystrom", "lsh", "local_dense", "additive", "location", "location_previous", "scaled_dot",
    "hard", "local_monotonic")]  # fmt: skip
#: Kinds whose maps are padded at the end of the last axis without any effect.
PADDABLE = [(name, dims) for name, dims in CASES if name != "swin2d"]


def build(name, dims, space=None, channels=8, heads=2):
    torch.manual_seed(0)
    block = make_attention(name, channels, heads, dims=dims, space=space or SPACES[dims]).double().eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.5)
    return block


def example(dims, space=None, batch=2, seed=1):
    shape = (batch, 8, *(space or SPACES[dims]))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gap(a, b):
    return float((a - b).detach().abs().nan_to_num(math.inf).max())


def test_the_annotation_lists_the_table():
    assert list(get_args(AttentionKind)) == list(ATTENTION)


#: Where each public attention of `genmodels.nn.attention` is chosen by name.
CHOSEN = {
    "Attention": "plain", "TransformerXL": "xl", "Shaw": "shaw", "MusicTransformer": "music", "T5Bias": "t5",
    "ALiBi": "alibi", "Rotary": "rope", "Rotary2d": "rope2d", "Swin2d": "swin2d", "MelPosition": "mel", "LSH": "lsh",
    "Nystrom": "nystrom", "LocalDenseSynthesizer": "local_dense", "LocalMonotonic": "local_monotonic",
    "HardAttention": "hard", "ScoredAttention": "additive", "Additive": "additive", "Location": "location",
    "ScaledDot": "scaled_dot",
}  # fmt: skip
#: What is made to be derived from.
BASES = {"Position", "DistanceBias", "Score"}


def test_the_causal_kinds_are_those_that_hide_the_future():
    found = []
    for name, kind in ATTENTION.items():
        mechanism = kind.make(8, 2, Site(1, None, 0.0, causal=True)) if kind.make and 1 in kind.dims else None
        if isinstance(mechanism, Attention) and mechanism.reach.causal_alone:
            found.append(name)
    assert sorted(found) == sorted(CAUSAL)


def test_every_public_attention_can_be_chosen():
    kinds = {name for name in attention.__all__ if isinstance(cls := getattr(attention, name), type)
             and issubclass(cls, nn.Module)}  # fmt: skip
    assert kinds == {*CHOSEN, *BASES}
    for name, chosen in CHOSEN.items():
        dims = ATTENTION[chosen].dims[-1]
        made = make_mechanism(chosen, 8, 2, Site(dims, (4, 4) if dims == 2 else None))
        assert any(type(part).__name__ == name for part in made.modules()), name


def test_options_that_have_names_of_their_own():
    made = {name: make_mechanism(name, 8, 2, Site(1)) for name in ATTENTION if 1 in ATTENTION[name].dims}
    assert len(made["music"].position.E) == len(made["shaw"].position.keys) == 2
    assert len(made["music_shared"].position.E) == len(made["shaw_shared"].position.keys) == 1
    assert made["location"].score.cumulative and not made["location_previous"].score.cumulative
    assert made["xl_chunks"].reach.chunk == (16, 1) and made["xl"].reach.everywhere
    assert made["rope_window"].reach.window == (16, 16) and made["rope"].reach.everywhere


# ---- what a block is ----


@pytest.mark.parametrize("name, dims", CASES)
def test_identity_at_the_start(name, dims):
    x = example(dims).float()
    block = make_attention(name, 8, 2, dims=dims, space=SPACES[dims])
    assert (block(x) == x).all()
    mask = (torch.arange(x.shape[-1]) < 4).view(1, *(1,) * dims, -1)
    if (name, dims) in PADDABLE:
        assert (block(x, mask) == x).all()


def by_loop(block, x):
    """The block by two loops; positions of maps row by row for schemes of maps, else column by column."""
    h, space = block.norm(x), tuple(x.shape[2:])
    if len(space) == 2 and not block.for_maps:
        rows = torch.stack([h[:, :, r, c] for c in range(space[1]) for r in range(space[0])], dim=1)
        y = reference_attention(block.mechanism, rows)[0]
        at = {(r, c): y[:, c * space[0] + r] for c in range(space[1]) for r in range(space[0])}
        return x + torch.stack([torch.stack([at[r, c] for c in range(space[1])], -1) for r in range(space[0])], -2)
    return x + reference_attention(block.mechanism, h.flatten(2).mT, **({"space": space} if len(space) == 2 else {}))[
        0
    ].mT.unflatten(2, space)


@pytest.mark.parametrize("name, dims", CORE)
def test_equals_the_double_loop(name, dims):
    block, x = build(name, dims), example(dims, batch=1)
    with torch.no_grad():
        assert gap(block(x), by_loop(block, x)) < 1e-10


class RowByRow(AttentionBlock):
    """A fault: a scheme for sequences reads the rows of a map, and padding moves what follows."""

    def _rows(self, x):
        return x.flatten(2)


def test_check_catches_another_order():
    block, x = build("xl", 2), example(2, batch=1)
    wrong = copy.deepcopy(block)
    wrong.__class__ = RowByRow
    assert gap(wrong(x), by_loop(block, x)) > 1e-3
    assert padding_gap(wrong, 2) > 1e-3


def test_places():
    block = AbsoluteAttention(4, 2, dims=2)
    code = block._code(6, 4, (2, 3), None)
    for place in range(6):
        y, x = divmod(place, 3)
        expected = [math.sin(y), math.cos(y), math.sin(x), math.cos(x)]
        assert torch.allclose(code[place], torch.tensor(expected, dtype=torch.float64))
    with pytest.raises(ValueError, match="6 positions need"):
        block(torch.zeros(1, 6, 4))


# ---- positions matter, at any resolution ----


@pytest.mark.parametrize("name, dims", CASES)
def test_only_blocks_without_positions_are_blind_to_order(name, dims):
    block, x = build(name, dims, (3, 4) if dims == 2 else (12,)), example(dims, (3, 4) if dims == 2 else (12,))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))

    def shuffled(t):
        return t.flatten(2)[..., order].view_as(t)

    difference = gap(block(shuffled(x)), shuffled(block(x)))
    # Twelve positions are as many landmarks, and one chunk.
    blind = ("plain", "nystrom", "lsh", "additive", "scaled_dot", "hard")
    assert difference < 1e-10 if name in blind else difference > 1e-3


@pytest.mark.parametrize("name, dims", CASES)
def test_other_resolutions(name, dims):
    """Trained at one size, sampled at another: nothing of the state depends on the size."""
    block = build(name, dims)
    spaces = {1: [(1,), (16,)], 2: [(5, 3), (7, 7), (1, 6), (4, 1)]}[dims]
    for space in [(3, 9), (3, 2), (3, 1)] if name == "mel" else spaces:
        x = example(dims, space)
        y = block(x)
        assert y.shape == x.shape and y.isfinite().all()
        if name != "mel" and dims == 2:
            other = make_attention(name, 8, 2, dims=dims, space=SPACES[dims]).double().eval()
            other.load_state_dict(block.state_dict())
            assert torch.equal(other(x), y)


@pytest.mark.parametrize("name", ["rope2d", "mel", "rope", "xl", "shaw", "music", "t5", "alibi", "absolute"])
def test_a_shift_of_the_content(name):
    """Relative blocks give a shifted map the shifted output, as far as nothing falls off; absolute ones do not."""
    block = build(name, 2, (3, 6))
    patch = example(2, (3, 3), batch=1)
    masks, outputs = [], []
    for start in (0, 2):
        x, mask = torch.zeros(1, 8, 3, 6).double(), torch.zeros(1, 1, 1, 6, dtype=torch.bool)
        x[..., start : start + 3], mask[..., start : start + 3] = patch, True
        outputs.append(block(x, mask)[..., start : start + 3])
        masks.append(mask)
    difference = gap(*outputs)
    assert difference > 1e-3 if name == "absolute" else difference < 1e-10


# ---- masks and batches ----


def padding_gap(block, dims):
    """The effect of padding the last axis, and of what stands there."""
    worst, lengths, full = 0.0, (5, 2, 3), (4, 5)[-dims:]
    x = example(dims, full, batch=3)
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).view(3, *(1,) * dims, 5)
    with torch.no_grad():
        y = block(x.masked_fill(~mask, 7.0), mask)
        worst = max(worst, gap(block(x.masked_fill(~mask, 0.0), mask) * mask, y * mask))
        for b, n in enumerate(lengths):
            worst = max(worst, gap(block(x[b : b + 1, ..., :n]), y[b : b + 1, ..., :n]))
    return worst


@pytest.mark.parametrize("name, dims", PADDABLE)
def test_padding_does_not_exist(name, dims):
    space = (4, 5) if name == "mel" else SPACES[dims]
    block = build(name, dims, space)
    assert padding_gap(block, dims) < 1e-10
    x, valid = example(dims, space), (torch.arange(space[-1]) < 4).view(1, *(1,) * dims, -1)
    (block(x.masked_fill(~valid, math.nan), valid) * valid).nan_to_num().square().sum().backward()
    for part, parameter in block.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), part


def test_maps_of_resampled_biases_take_no_mask():
    with pytest.raises(ValueError, match="which padding changes"):
        build("swin2d", 2)(example(2), torch.ones(2, 1, 1, 5, dtype=torch.bool))


@pytest.mark.parametrize("name, dims", CASES)
def test_an_example_does_not_depend_on_its_batch(name, dims):
    block, x = build(name, dims), example(dims, batch=3)
    alone = torch.cat([block(x[b : b + 1]) for b in range(3)])
    assert gap(block(x), alone) < 1e-10


@pytest.mark.parametrize("name, dims", CASES)
def test_training_is_the_same_function(name, dims):
    """No dropout, and hashes are not drawn anew: a coupling is the same in both directions."""
    space = (6, 12) if dims == 2 else (72,)
    block, x = build(name, dims, space), example(dims, space)
    y = block(x)
    assert torch.equal(block.train()(x), y) and block.training and torch.equal(block(x), y)


# ---- gradients, precision, compilation ----


@pytest.mark.parametrize("name, dims", CASES)
def test_gradient_reaches_every_parameter(name, dims):
    block, x = build(name, dims).train(), example(dims).requires_grad_()
    block(x).square().sum().backward()
    assert x.grad.isfinite().all()
    unreached = [n for n, p in block.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-9]
    # A bias of the keys cancels in a softmax without positions that turn them.
    assert [n for n in unreached if "project_k.bias" not in n] == []


@pytest.mark.parametrize("name, dims", [case for case in CASES if case[0] != "lsh"])
def test_second_derivatives_of_an_energy(name, dims):
    block, x = build(name, dims), example(dims, batch=1).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        energy = block(x).square().sum()
        (score,) = torch.autograd.grad(energy, x, create_graph=True)
        v = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        (product,) = torch.autograd.grad((score * v).sum(), x)
        step = 1e-5
        ahead, behind = (torch.autograd.grad(block(x + s * v).square().sum(), x)[0] for s in (step, -step))
    assert gap(product, (ahead - behind) / (2 * step)) < 1e-5 * float(product.abs().max())


#: Every position and mechanism is compiled in the tests of `nn.attention`: here what a block adds to them, for
#: sequences, for maps read by rows and by columns, with and without the size of the map, and in chunks.
COMPILED = [("plain", 1), ("plain", 2), ("absolute", 2), ("rope", 1), ("rope", 2), ("swin2d", 2), ("xl_chunks", 1),
            ("nystrom", 1)]


@pytest.mark.parametrize("name, dims", COMPILED)
def test_traces_without_a_graph_break(name, dims):
    block, x = build(name, dims), example(dims)
    mask = None
    if (name, dims) in PADDABLE:
        mask = (torch.arange(x.shape[-1]) < 4).view(1, *(1,) * dims, -1).expand(2, *(1,) * dims, -1)
    torch._dynamo.reset()
    traced = torch.compile(block, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert gap(traced(x, mask), block(x, mask)) < 1e-10


# ---- in the networks ----


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("event_shape", [(2, 7, 10), (3, 13)])
def test_in_a_unet(name, event_shape):
    dims = len(event_shape) - 1
    options = {"channels": 8, "multipliers": (1, 2), "blocks": 1, "heads": 2, "attention": name}
    if dims not in ATTENTION[name].dims:
        with pytest.raises(ValueError, match=f"attention = '{name}' is not one of none, plain.* for sequences"):
            UNet(event_shape, **options)
        return
    torch.manual_seed(0)
    net = UNet(event_shape, **options)
    x = torch.randn(2, *event_shape)
    assert (net(x, torch.zeros(2)) == 0).all()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)
    net.eval()
    sizes = [event_shape] if name == "mel" else [event_shape, tuple(2 * n + 1 for n in event_shape[1:])]
    for size in sizes:
        y = net(torch.randn(2, event_shape[0], *size[-dims:]), torch.zeros(2))
        assert y.isfinite().all() and y.shape[2:] == size[-dims:]


@pytest.mark.parametrize("name, dims", CASES)
def test_one_step_of_training_in_a_unet(name, dims):
    """The gradient reaches the whole network, is finite under a mask, and a small step along it lowers the loss."""
    torch.manual_seed(0)
    shape = (1, 6, 6) if dims == 2 else (2, 13)
    net = UNet(shape, channels=8, multipliers=(1, 2), blocks=1, heads=2, attention=name)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)  # what starts at zero would hide what is behind it
    x, target, log_snr = torch.randn(2, *shape), torch.randn(2, *shape), torch.zeros(2)
    mask = None
    if (name, dims) in PADDABLE:
        mask = (torch.arange(shape[-1]) < torch.tensor([[shape[-1]], [4]]))[:, None]

    def loss():
        return (net(x, log_snr, None, mask) - target).square().mean()

    before = loss()
    before.backward()
    attention = [p for block in net.modules() if isinstance(block, AttentionBlock) for p in block.parameters()]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in [*net.parameters(), *attention])
    torch.optim.SGD(net.parameters(), lr=1e-4).step()
    assert loss() < before


def test_tables_are_made_for_the_sizes_of_the_levels():
    net = UNet((1, 7, 12), channels=8, multipliers=(1, 2), blocks=1, heads=2, attention="swin2d", attention_at=[7, 4])
    sizes = {name: m.position.size for name, m in net.named_modules() if isinstance(m, Attention)}
    assert {size for name, size in sizes.items() if name.startswith("down.0")} == {(7, 12)}
    assert {size for name, size in sizes.items() if name.startswith(("down.1", "middle"))} == {(4, 6)}


def test_the_default_keeps_its_names():
    names = list(UNet((1, 8, 8), channels=8, multipliers=(1, 2), blocks=1, heads=2).state_dict())
    kept = [name.removeprefix("middle.0.attention.") for name in names if name.startswith("middle.0.attention.")]
    assert kept == ["norm.weight", "norm.bias", "project_in.weight", "project_out.weight", "project_out.bias"]
    assert sum("attention" in name for name in names) == 5 * 4


@pytest.mark.parametrize("make, words", [
    (lambda: make_attention("relative", 8, 2, dims=2), "attention = 'relative' is not one of none, plain, abs"),
    (lambda: make_attention("musik", 8, 2, dims=2), "is not one of .*; did you mean 'music'"),
    (lambda: make_attention("rope2d", 8, 4, dims=2), "width 2, not a multiple of 4"),
    (lambda: make_attention("xl", 8, 3, dims=1), "heads = 3 does not divide the width 8"),
    (lambda: make_attention("mel", 8, 2, dims=2), "this network takes maps of any height: use rope2d"),
    (lambda: ConvNet(2, 2, hidden=8, dims=1, attention="swin2d"), "'swin2d' is not one of .* for sequences"),
])  # fmt: skip
def test_errors_are_one_line(make, words, refuses):
    refuses(ValueError, words, make)


def test_hashes_stay_those_that_were_drawn_from_the_first_call_on():
    """Also before anyone has said train() or eval(): a coupling must be the same function in both directions."""
    torch.manual_seed(0)
    block, x = make_attention("lsh", 8, 2, dims=1), torch.randn(1, 8, 40)
    nn.init.normal_(block.mechanism.project_out.weight)
    assert torch.equal(block(x), block(x)) and torch.equal(block.train()(x), block.eval()(x))


# ---- attention over positions against a double loop ----


def plain_example(space=(3, 4), channels=8, heads=2):
    torch.manual_seed(0)
    attention = SpatialAttention(channels, heads).double()
    nn.init.normal_(attention.project_out.weight)
    return attention, torch.randn(2, channels, *space, dtype=torch.float64)


def plain_by_loop(attention, x, mask=None):
    rows = attention.norm(x, mask=mask).flatten(2).transpose(1, 2)
    q, k, v = attention.project_in(rows).chunk(3, dim=-1)
    width = x.shape[1] // attention.heads
    y = torch.zeros_like(q)
    for b in range(len(x)):
        valid = range(q.shape[1]) if mask is None else mask[b].expand(1, *x.shape[2:]).flatten().nonzero().flatten()
        for h in range(attention.heads):
            part = slice(h * width, (h + 1) * width)
            for i in range(q.shape[1]):
                scores = torch.stack([q[b, i, part] @ k[b, j, part] for j in valid]) / math.sqrt(width)
                weights = torch.softmax(scores, 0)
                y[b, i, part] = sum(w * v[b, j, part] for w, j in zip(weights, valid, strict=True))
    return x + attention.project_out(y).transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("space", [(5,), (3, 4)])
def test_equals_the_loop(space):
    attention, x = plain_example(space)
    assert torch.allclose(attention(x), plain_by_loop(attention, x), atol=1e-12)
    # Mutant: heads mixed up.
    attention.heads = 4
    wrong = attention(x)
    attention.heads = 2
    assert not torch.allclose(wrong, plain_by_loop(attention, x), atol=1e-3)


@pytest.mark.parametrize("space", [(5,), (3, 5)])
def test_masked_positions_are_not_attended_to(space):
    attention, x = plain_example(space)
    mask = (torch.arange(5) < torch.tensor([3, 5])[:, None]).reshape(2, *(1,) * len(space), 5)
    expected = plain_by_loop(attention, x, mask)
    assert torch.allclose(attention(x, mask), expected, atol=1e-12)
    assert not torch.allclose(attention(x), expected, atol=1e-3)


def test_without_positions_the_order_does_not_matter():
    attention, x = plain_example((12,))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(attention(x[..., order]), attention(x)[..., order], atol=1e-12)


@pytest.mark.parametrize("heads", [0, 3, 16])
def test_heads_must_divide_the_channels(heads):
    with pytest.raises(ValueError, match=f"heads = {heads} does not divide 8 channels: use one of 1, 2, 4, 8"):
        SpatialAttention(8, heads)


@pytest.mark.parametrize("attention", [kind for kind in ATTENTION if kind not in ("none", "hard")])
def test_an_energy_with_attention_has_second_derivatives(attention):
    torch.manual_seed(0)
    net = UNetEnergy((1, 4, 4), channels=8, multipliers=(1,), attention=attention, heads=2).double()
    for parameter in net.parameters():  # what begins at zero would hide a missing term
        parameter.data += 0.1 * torch.randn_like(parameter)
    x = torch.randn(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: net(x), x, fast_mode=True)
