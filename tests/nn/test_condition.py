"""Conditions and how they reach layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from genmodels.nn import (
    MLP,
    Condition,
    Conditioning,
    ConvNet,
    GatedConvNet,
    ResidualConvNet,
    ResidualMLP,
    WaveNet,
    modulate,
)
from genmodels.nn.condition import Net


def built(condition, widths, **options):
    torch.manual_seed(0)
    return Conditioning(condition, widths, **options).double()


def test_concatenation_reaches_the_first_layer_or_all():
    condition, x = Condition("vector", 2), torch.zeros(3, 1, 4, 4).double()
    c = torch.randn(3, 2).double()
    (none, shift), *rest = built(condition, [5, 6, 7])(c, x)
    assert none is None and shift.shape == (3, 5, 1, 1) and rest == [None, None]
    pairs = built(condition, [5, 6, 7], everywhere=True)(c, x)
    assert [(scale, shift.shape[1]) for scale, shift in pairs] == [(None, 5), (None, 6), (None, 7)]


def test_film_reaches_all_layers():
    pairs = built(Condition("labels", 4), [5, 6], conditioning="film", dims=1)(
        torch.tensor([0, 3]), torch.zeros(2, 1, 9)
    )
    assert [(scale.shape, shift.shape) for scale, shift in pairs] == [((2, n, 1), (2, n, 1)) for n in (5, 6)]
    assert not torch.equal(pairs[0][0], pairs[0][1])


def test_labels_are_rows_and_vectors_products_and_maps_local():
    labels = built(Condition("labels", 4), [3], dims=0)
    ((_, shift),) = labels(torch.tensor([2, 0, 2]), torch.zeros(3, 1).double())
    assert torch.equal(shift, labels.project.weight[[2, 0, 2]])

    vector, c = built(Condition("vector", 2), [3], dims=0), torch.randn(4, 2).double()
    ((_, shift),) = vector(c, torch.zeros(4, 1).double())
    assert torch.allclose(shift, c @ vector.project.weight.T, atol=1e-12)

    local, c = built(Condition("map", 2), [3], dims=1, kernel_size=3), torch.randn(1, 2, 8).double()
    other = c.clone()
    other[..., 5] += 1
    before, after = (local(part, torch.zeros(1, 1, 8).double())[0][1] for part in (c, other))
    assert ((before - after).abs().amax((0, 1)) > 0).tolist() == [False] * 4 + [True] * 3 + [False]


def test_a_map_is_hidden_outside_the_mask():
    local, c = built(Condition("map", 2), [3], dims=1, kernel_size=3), torch.randn(1, 2, 8).double()
    x, mask = torch.zeros(1, 1, 8).double(), (torch.arange(8) < 5)[None, None]
    ((_, expected),) = local(c[..., :5], x[..., :5])
    ((_, shift),) = local(c.masked_fill(~mask, float("nan")), x, mask)
    assert torch.allclose(shift[..., :5], expected, atol=1e-12)


def test_a_condition_in_another_precision_is_taken_in_that_of_x():
    vector, c = built(Condition("vector", 2), [3], dims=0), torch.randn(4, 2)
    ((_, shift),) = vector(c, torch.zeros(4, 1).double())
    assert shift.dtype == torch.float64


def test_modulate():
    h, scale, shift = torch.randn(3, 2, 5, 4).double()
    assert torch.equal(modulate(h, None), h)
    assert torch.equal(modulate(h, (None, shift)), h + shift)
    assert torch.allclose(modulate(h, (scale, shift)), h * (1 + scale) + shift, atol=1e-12)


def test_squeezed_counts_the_positions_of_maps_only():
    assert Condition("map", 3).squeezed().squeezed(3).stride == 6
    for kind in ("labels", "vector"):
        assert Condition(kind, 3).squeezed() == Condition(kind, 3)


X = torch.zeros(2, 3, 8)
WRONG = {
    "float labels": (Condition("labels", 4), torch.zeros(2)),
    "one-hot labels": (Condition("labels", 4), torch.zeros(2, 4, dtype=torch.int64)),
    "boolean labels": (Condition("labels", 4), torch.zeros(2, dtype=torch.bool)),
    "other batch": (Condition("labels", 4), torch.zeros(3, dtype=torch.int64)),
    "integer vector": (Condition("vector", 4), torch.zeros(2, 4, dtype=torch.int64)),
    "other length": (Condition("vector", 4), torch.zeros(2, 5)),
    "other positions": (Condition("map", 4), torch.zeros(2, 4, 7)),
    "map without positions": (Condition("map", 4), torch.zeros(2, 4)),
    "not squeezed": (Condition("map", 4, stride=2), torch.zeros(2, 4, 8)),
}


@pytest.mark.parametrize("condition, cond", WRONG.values(), ids=WRONG)
def test_a_condition_that_does_not_fit(condition, cond, refuses):
    assert str(tuple(cond.shape)) in refuses(ValueError, "cond must be ", built(condition, [3], dims=1), cond, X)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Condition("image", 3), "one of labels, vector, map, got 'image'"),
        (lambda: Condition("labels", 0), "size and stride of at least 1, got 0 and 1"),
        (lambda: Condition("map", 2, stride=0), "got 2 and 0"),
    ],
)
def test_errors(make, words):
    with pytest.raises(ValueError, match=words):
        make()


IN, OUT, HIDDEN = 3, 4, 8


def called(value):
    """Readable names of the cases."""
    return value.kind if isinstance(value, Condition) else str(value)


LABELS, VECTOR, MAP = Condition("labels", 5), Condition("vector", 2), Condition("map", 2)

#: Name, spatial dimensions, constructor.
NETS = {
    "mlp": (0, lambda **o: MLP(IN, OUT, hidden=HIDDEN, **o)),
    "mlp-relu-deep": (0, lambda **o: MLP(IN, OUT, hidden=HIDDEN, depth=3, activation="relu", **o)),
    "residual-mlp": (0, lambda **o: ResidualMLP(IN, OUT, hidden=HIDDEN, **o)),
    "conv-1d": (1, lambda **o: ConvNet(IN, OUT, hidden=HIDDEN, dims=1, **o)),
    "conv-2d": (2, lambda **o: ConvNet(IN, OUT, hidden=HIDDEN, **o)),
    "conv-2d-head-alone": (2, lambda **o: ConvNet(IN, OUT, depth=0, hidden=HIDDEN, **o)),
    "residual-1d": (1, lambda **o: ResidualConvNet(IN, OUT, hidden=HIDDEN, depth=2, dims=1, **o)),
    "residual-2d": (2, lambda **o: ResidualConvNet(IN, OUT, hidden=HIDDEN, depth=2, **o)),
    "gated-1d": (1, lambda **o: GatedConvNet(IN, OUT, hidden=HIDDEN, depth=2, dims=1, **o)),
    "gated-2d": (2, lambda **o: GatedConvNet(IN, OUT, hidden=HIDDEN, depth=2, **o)),
    "wavenet": (1, lambda **o: WaveNet(IN, OUT, hidden=HIDDEN, depth=3, kernel_size=3, dilation_rate=2, **o)),
}
SPACE = {0: (), 1: (7,), 2: (5, 6)}

CASES = [(name, cond, kind) for name in NETS for cond, kind in [(None, "concat"), (LABELS, "concat"), (VECTOR, "film")]]
CASES += [(name, MAP, kind) for name, (dims, _) in NETS.items() for kind in ("concat", "film") if dims]
SPATIAL = [name for name, (dims, _) in NETS.items() if dims and name != "conv-2d-head-alone"]


def build(name, cond=None, conditioning="concat", random=True, **options):
    """A network in float64 and evaluation mode, with random weights or as it starts."""
    torch.manual_seed(0)
    net = NETS[name][1](cond=cond, conditioning=conditioning, **options).double().eval()
    if random:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.normal_(std=0.4)
    return net


def condition_for(cond, x, seed=1):
    generator = torch.Generator().manual_seed(seed)
    if cond is None:
        return None
    if cond.kind == "labels":
        return torch.randint(cond.size, (len(x),), generator=generator)
    space = tuple(cond.stride * n for n in x.shape[2:]) if cond.kind == "map" else ()
    return torch.randn(len(x), cond.size, *space, generator=generator, dtype=torch.float64)


def example(name, batch=3, cond=None, space=None):
    x = torch.randn(batch, IN, *(space or SPACE[NETS[name][0]]), generator=torch.Generator().manual_seed(2)).double()
    return x, condition_for(cond, x)


def lengths_mask(lengths, total):
    return (torch.arange(total) < torch.tensor(lengths)[:, None])[:, None]


# ---- the start ----


@pytest.mark.parametrize("name, cond, conditioning", CASES, ids=called)
def test_starts_at_zero_or_at_the_given_bias(name, cond, conditioning):
    net, (x, c) = build(name, cond, conditioning, random=False), example(name, cond=cond)
    y = net(x, c)
    assert y.shape == (len(x), OUT, *x.shape[2:]) and y.dtype == x.dtype and (y == 0).all()
    bias = torch.tensor([0.3, -1.0, 2.0, 1e-3])
    net.set_output_bias(bias)
    assert (net(x, c) == bias.double().view(1, OUT, *(1,) * (x.dim() - 2))).all()
    assert net.uses_cond == (cond is not None)


def test_output_bias_of_another_length():
    with pytest.raises(ValueError, match=r"shape \(4,\), got \(3,\)"):
        build("conv-2d").set_output_bias(torch.zeros(3))


@pytest.mark.parametrize("name, cond, conditioning", CASES, ids=called)
def test_the_input_is_left_alone_and_the_result_is_contiguous(name, cond, conditioning):
    net, (x, c) = build(name, cond, conditioning), example(name, cond=cond)
    before, c_before = x.clone(), None if c is None else c.clone()
    assert net(x, c).is_contiguous()
    assert torch.equal(x, before) and (c is None or torch.equal(c, c_before))


@pytest.mark.parametrize("in_channels", [1, 2])
@pytest.mark.parametrize("make", [ConvNet, ResidualConvNet, GatedConvNet])
def test_images_are_worked_on_with_channels_last(make, in_channels):
    """A map of one channel fits both memory formats: it must not turn the whole network to the slower one."""
    net, outputs = make(in_channels, 2, hidden=8, depth=2), []
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda layer, inputs, output: outputs.append(output))
    net(torch.randn(2, in_channels, 4, 4))
    assert outputs and all(y.is_contiguous(memory_format=torch.channels_last) for y in outputs)


# ---- gradients ----


def unreached(net, x, c):
    x = x.clone().requires_grad_()
    if c is not None and c.is_floating_point():
        c = c.clone().requires_grad_()
    net.zero_grad()
    net(x, c).square().sum().backward()
    inputs = {"x": x} | ({"cond": c} if c is not None and c.requires_grad else {})
    everything = inputs | dict(net.named_parameters())
    assert all(t.grad is None or t.grad.isfinite().all() for t in everything.values())
    return [name for name, t in everything.items() if t.grad is None or not t.grad.abs().max() > 1e-9]


@pytest.mark.parametrize("name, cond, conditioning", CASES, ids=called)
def test_gradient_reaches_every_parameter_and_the_condition(name, cond, conditioning):
    net, (x, c) = build(name, cond, conditioning), example(name, cond=cond)
    assert unreached(net, x, c) == []


@pytest.mark.parametrize("name", SPATIAL)
def test_gradient_reaches_the_attention(name):
    net, (x, _) = build(name, attention="plain", heads=2), example(name)
    # The shift of the attention's norm is the same for all keys, so part of it cancels: only the rest is seen.
    assert unreached(net, x, None) == []


def test_check_catches_a_dead_parameter():
    net, (x, c) = build("residual-mlp", VECTOR), example("residual-mlp", cond=VECTOR)
    net.outer[0].weight.data.zero_()
    assert unreached(net, x, c) == ["inner.0.weight", "inner.0.bias"]


# ---- examples, condition ----


@torch.no_grad()
def batch_dependence(net, x, c):
    alone = torch.cat([net(x[i : i + 1], None if c is None else c[i : i + 1]) for i in range(len(x))])
    return float((net(x, c) - alone).abs().max())


@pytest.mark.parametrize("name, cond, conditioning", CASES, ids=called)
def test_an_example_does_not_depend_on_its_batch(name, cond, conditioning):
    net, (x, c) = build(name, cond, conditioning), example(name, cond=cond)
    assert batch_dependence(net, x, c) < 1e-12


def test_check_catches_statistics_over_the_batch():
    net, (x, _) = build("residual-2d"), example("residual-2d")
    net.norm = nn.BatchNorm2d(HIDDEN).double().train()
    assert batch_dependence(net, x, None) > 1e-3


@pytest.mark.parametrize("name, cond, conditioning", [case for case in CASES if case[1] is not None], ids=called)
def test_the_condition_of_an_example_matters_to_it_alone(name, cond, conditioning):
    net, (x, c) = build(name, cond, conditioning), example(name, cond=cond)
    other = c.clone()
    other[1] = (c[1] + 1) % cond.size if cond.kind == "labels" else c[1] + 1
    change = (net(x, c) - net(x, other)).abs().flatten(1).amax(1)
    assert change[1] > 1e-3 and change[0] < 1e-12 and change[2] < 1e-12


@pytest.mark.parametrize("name", ["mlp", "mlp-relu-deep", "residual-mlp"])
def test_a_concatenated_vector_is_more_input(name):
    """A network of [x, c] whose first weights are [W, V] is the same function."""
    net, (x, c) = build(name, VECTOR), example(name, cond=VECTOR)
    wide = build(name)
    wide.in_channels = IN + VECTOR.size
    wide.load_state_dict({key: value for key, value in net.state_dict().items() if "conditioning" not in key})
    wide.stem.weight = nn.Parameter(torch.cat([net.stem.weight, net.conditioning.project.weight], dim=1))
    assert torch.allclose(wide(torch.cat([x, c], dim=1)), net(x, c), atol=1e-12)


@pytest.mark.parametrize("name", ["conv-1d", "conv-2d", "residual-2d", "gated-1d", "gated-2d"])
def test_a_concatenated_map_is_more_input(name):
    net, (x, c) = build(name, MAP), example(name, cond=MAP)
    wide = build(name)
    wide.in_channels = IN + MAP.size
    wide.load_state_dict({key: value for key, value in net.state_dict().items() if "conditioning" not in key})
    stem = wide.layers[0] if name.startswith("conv") else wide.stem
    stem.weight = nn.Parameter(torch.cat([stem.weight, net.conditioning.project.weight], dim=1))
    assert torch.allclose(wide(torch.cat([x, c], dim=1)), net(x, c), atol=1e-12)


@pytest.mark.parametrize("name", ["conv-1d", "conv-2d", "wavenet"])
@pytest.mark.parametrize("conditioning", ["concat", "film"])
def test_a_map_of_the_positions_before_a_squeeze(name, conditioning):
    """Its blocks are channels at the positions of the network."""
    squeezed = MAP.squeezed(2)
    net, (x, c) = build(name, squeezed, conditioning), example(name, cond=squeezed)
    blocks = torch.zeros(len(x), MAP.size * 2**net.dims, *x.shape[2:], dtype=torch.float64)
    offsets = [(i,) for i in range(2)] if net.dims == 1 else [(i, j) for i in range(2) for j in range(2)]
    for channel in range(MAP.size):
        for number, offset in enumerate(offsets):
            part = c[(slice(None), channel, *(slice(i, None, 2) for i in offset))]
            blocks[:, channel * len(offsets) + number] = part
    plain = build(name, Condition("map", blocks.shape[1]), conditioning)
    plain.load_state_dict(net.state_dict())
    assert torch.allclose(net(x, c), plain(x, blocks), atol=1e-12)


# ---- masks ----


@torch.no_grad()
def mask_errors(net, x, c, mask, lengths):
    """How much masked content and how much the padding itself changes, and what is left outside the mask."""
    y = net(x, c, mask)
    dirty = x.masked_fill(~mask, float("nan"))
    local = c is not None and c.shape[2:] == x.shape[2:] and c.dim() > 2
    dirty_c = c.masked_fill(~mask, 1e6) if local else c
    content = (net(dirty, dirty_c, mask) - y).abs().max()
    padding = 0.0
    for i, length in enumerate(lengths):
        alone = None if c is None else c[i : i + 1, ..., :length] if local else c[i : i + 1]
        padding = max(padding, float((net(x[i : i + 1, ..., :length], alone) - y[i : i + 1, ..., :length]).abs().max()))
    return float(content), padding, float(y.masked_fill(mask, 0).abs().max())


MASKED = [(name, cond, kind, attention) for name in SPATIAL + ["conv-2d-head-alone"]
          for cond, kind in [(None, "concat"), (LABELS, "film"), (VECTOR, "concat"), (MAP, "concat"), (MAP, "film")]
          for attention in (("none",) if name == "conv-2d-head-alone" else ("none", "plain"))]  # fmt: skip


def masked_example(name, cond):
    lengths = [7, 3, 5]
    x, c = example(name, cond=cond, space=(7,) if NETS[name][0] == 1 else (5, 7))
    mask = lengths_mask(lengths, 7)
    if NETS[name][0] == 2:
        mask = mask[:, :, None].expand(-1, 1, 5, -1)
    return x, c, mask, lengths


@pytest.mark.parametrize("name, cond, conditioning, attention", MASKED, ids=called)
def test_masked_content_and_padding_change_nothing(name, cond, conditioning, attention):
    net = build(name, cond, conditioning, attention=attention, heads=2)
    content, padding, outside = mask_errors(net, *masked_example(name, cond))
    assert content == 0 and padding < 1e-12 and outside == 0


class Unhidden(Net):
    """Hides what comes in, but not what the layers make of it: a bias comes back to where the mask was."""

    def __init__(self):
        super().__init__(IN, OUT, HIDDEN, [HIDDEN], cond=None, conditioning="concat", dims=1)
        self.stem, self.head = nn.Conv1d(IN, HIDDEN, 3, padding=1), nn.Conv1d(HIDDEN, OUT, 3, padding=1)

    def forward(self, x, cond=None, mask=None):
        x, _ = self.enter(x, cond, mask)
        return self.head(self.stem(x).relu())


def test_check_catches_layers_that_are_not_hidden():
    torch.manual_seed(0)
    _, padding, outside = mask_errors(Unhidden().double(), *masked_example("conv-1d", None))
    assert padding > 1e-3 and outside > 1e-3


# ---- precision, compilation, dropout ----


@pytest.mark.parametrize("name", NETS)
def test_half_precision_by_autocast(name):
    net, (x, _) = build(name).float(), example(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(x.float())
    exact = net.double()(x)
    assert y.isfinite().all() and (y.double() - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize("name", NETS)
def test_traces_without_a_graph_break(name):
    dims = NETS[name][0]
    cond, conditioning = (MAP, "film") if dims == 2 else (LABELS, "film") if dims else (VECTOR, "concat")
    net, (x, c) = build(name, cond, conditioning), example(name, cond=cond)
    mask = lengths_mask([7, 3, 5], 7) if dims == 1 else None
    torch._dynamo.reset()
    traced = torch.compile(net, fullgraph=True, backend="eager")
    assert torch.allclose(traced(x, c, mask), net(x, c, mask), atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "residual-mlp", "residual-2d", "wavenet"])
def test_dropout_acts_in_training_only(name):
    net, (x, _) = build(name, dropout=0.5), example(name)
    assert torch.equal(net(x), net(x))
    net.train()
    assert not torch.equal(net(x), net(x))


# ---- errors ----


def test_attention_acts_after_the_hidden_layers():
    net, (x, _) = build("conv-1d", attention="plain", heads=2), example("conv-1d")
    far = x.clone()
    far[..., -1] += 1
    assert (net(x) - net(far))[..., 0].abs().max() > 1e-6  # beyond the reach of two convolutions
    plain = build("conv-1d")
    assert (plain(x) - plain(far))[..., 0].abs().max() == 0


ERRORS = [
    (lambda: build("mlp")(torch.zeros(2, 5).double()), r"MLP takes x \(B, 3\), got \(2, 5\)"),
    (lambda: build("conv-2d")(torch.zeros(2, 3, 5).double()), r"ConvNet takes x \(B, 3, H, W\), got \(2, 3, 5\)"),
    (lambda: build("wavenet")(torch.zeros(2, 4, 5).double()), r"WaveNet takes x \(B, 3, T\), got \(2, 4, 5\)"),
    (lambda: build("mlp")(torch.zeros(2, 3).double(), mask=torch.ones(2, 1, 3).bool()), "vectors of one length"),
    (lambda: build("residual-mlp")(torch.zeros(2, 3).double(), mask=torch.ones(2, 3).bool()), "vectors of one length"),
    (lambda: build("mlp", MAP), "vectors have no positions"),
    (lambda: MLP(3, 4, depth=0), "MLP needs one channel and one layer at least, .* hidden = 256 and 0 layers"),
    (lambda: ResidualMLP(3, 4, depth=0), "depth must be at least 1, got 0"),
    (lambda: ResidualConvNet(3, 4, depth=-1), "and 0 layers"),
    (lambda: ConvNet(0, 4), "in_channels = 0"),
    (lambda: ConvNet(3, 4, dims=3), "1 or 2 spatial dimensions, got dims = 3"),
    (lambda: ConvNet(3, 4, depth=0, attention="plain"), "depth = 0 has none"),
    (lambda: ConvNet(3, 4, attention="plane"), "attention = 'plane' is not one of none, plain"),
    (lambda: ConvNet(3, 4, hidden=8, attention="plain", heads=3), "heads = 3 does not divide 8"),
    (lambda: MLP(3, 4, activation="gelu"), "activation must be one of silu, relu, got 'gelu'"),
    (lambda: MLP(3, 4, conditioning="add"), "conditioning must be one of concat, film, got 'add'"),
    (lambda: WaveNet(3, 4, kernel_size=4), "kernel_size = 4 must be odd"),
    (lambda: WaveNet(3, 4, dilation_rate=0), "dilation_rate must be at least 1, got 0"),
]


@pytest.mark.parametrize("make, words", ERRORS)
def test_errors_are_one_line(make, words, refuses):
    refuses(ValueError, words, make)


@pytest.mark.parametrize("name, cond, conditioning", CASES, ids=called)
def test_a_condition_that_is_missing_or_not_expected(name, cond, conditioning):
    net, (x, c) = build(name, cond, conditioning), example(name, cond=cond)
    if cond is None:
        with pytest.raises(ValueError, match="without a condition: leave cond out"):
            net(x, torch.zeros(3))
    else:
        with pytest.raises(ValueError, match=f"needs cond: {cond.kind}"):
            net(x)
        with pytest.raises(ValueError, match="cond must be"):
            net(x, c[:2])
        wrong = {"labels": VECTOR, "vector": replace(VECTOR, size=3), "map": LABELS}[cond.kind]
        with pytest.raises(ValueError, match="cond must be"):
            net(x, condition_for(wrong, x))
