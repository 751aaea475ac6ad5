"""Couplings of every kind, on vectors, sequences and images; the checks of bijections run over tests/flows/table.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from genmodels.core.tensors import hide
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Checkerboard, Coupling, TokenSplit
from genmodels.flows.elementwise import Additive, Affine, LogisticMixture
from genmodels.flows.spline import RationalQuadraticSpline
from genmodels.nn import ATTENTION, ConvNet, GatedConvNet, ResidualConvNet
from genmodels.verification.bijections import check_bijection

CONVOLUTION = {0: None, 1: nn.Conv1d, 2: nn.Conv2d}


class Net(nn.Module):
    """A small network: one hidden layer, neighbours seen, labels added."""

    def __init__(self, in_channels, out_channels, dims=0, labels=None):
        super().__init__()
        self.in_channels, self.out_channels, self.uses_cond = in_channels, out_channels, labels is not None

        def layer(before, after):
            return CONVOLUTION[dims](before, after, 3, padding=1) if dims else nn.Linear(before, after)

        self.first, self.last = layer(in_channels, 6), layer(6, out_channels)
        self.embedding = nn.Embedding(labels, 6) if labels else None
        nn.init.zeros_(self.last.weight)

    def set_output_bias(self, bias):
        with torch.no_grad():
            self.last.bias.copy_(bias)

    def forward(self, x, cond=None, mask=None):
        h = self.first(hide(x, mask))
        if self.embedding is not None:
            h = h + self.embedding(cond).view(len(x), -1, *[1] * (x.dim() - 2))
        return self.last(hide(torch.tanh(h), mask))


def coupling(split, transform, dims=0, labels=None, layer=Coupling):
    return layer(split, transform, Net(split.kept, transform.params_per_dim * split.changed, dims, labels))


COUPLINGS = {  # the layer and an event shape
    "additive": (lambda: coupling(ChannelSplit(4), Additive()), (4,)),
    "affine": (lambda: coupling(ChannelSplit(4), Affine(2)), (4,)),
    "affine, odd": (lambda: coupling(ChannelSplit(5), Affine(2)), (5,)),
    "affine, odd, swapped": (lambda: coupling(ChannelSplit(5, swap=True), Affine(3)), (5,)),
    "affine sigmoid": (lambda: coupling(ChannelSplit(2), Affine(1, scale="sigmoid")), (2,)),
    "affine tied": (lambda: coupling(ChannelSplit(3), Affine(1, scale="tied")), (3,)),
    "spline": (lambda: coupling(ChannelSplit(4, swap=True), RationalQuadraticSpline(bins=4)), (4,)),
    "mixture": (lambda: coupling(ChannelSplit(3), LogisticMixture(1, components=3)), (3,)),
    "sequence affine": (lambda: coupling(ChannelSplit(3), Affine(1), 1), (3, 6)),
    "sequence spline": (lambda: coupling(ChannelSplit(3, swap=True), RationalQuadraticSpline(bins=3), 1), (3, 5)),
    "image affine": (lambda: coupling(ChannelSplit(3), Affine(1, scale="tied"), 2), (3, 2, 3)),
    "checkerboard affine": (lambda: coupling(Checkerboard(2), Affine(2), 2), (2, 2, 3)),
    "checkerboard, other half": (lambda: coupling(Checkerboard(1, parity=1), Affine(1), 2), (1, 3, 3)),
    "checkerboard spline": (lambda: coupling(Checkerboard(1), RationalQuadraticSpline(bins=3), 2), (1, 3, 2)),
    "checkerboard mixture": (lambda: coupling(Checkerboard(1), LogisticMixture(1, components=2), 2), (1, 2, 3)),
    "labels": (lambda: coupling(ChannelSplit(3), Affine(1), labels=4), (3,)),
}
every_coupling = pytest.mark.parametrize("name", COUPLINGS)


def randomise(layer, seed=0, scale=0.5):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return layer


def ready(make, shape, batch=3, dtype=torch.float64):
    layer = randomise(make().to(dtype))
    generator = torch.Generator().manual_seed(1)
    x = 1.5 * torch.randn((batch, *shape), generator=generator, dtype=dtype)
    return layer, x, (torch.arange(batch) % 4 if layer.uses_cond else None)


def close(a, b, tolerance):
    assert a.isfinite().all() and b.isfinite().all()
    assert (a - b).abs().max() <= tolerance * (1 + b.abs().max())


# ---- the checks ----


def keeps_its_part(make, shape):
    """What is kept stays as it is, to the sign of a zero, in both directions; what is changed does change."""
    layer, x, cond = ready(make, shape)
    if isinstance(layer.split, Checkerboard):
        kept = layer.split.squares(x).expand(x.shape[1:])
    else:
        first = torch.arange(shape[0]) < layer.split.first
        kept = (~first if layer.split.swap else first).reshape(-1, *[1] * (len(shape) - 1)).expand(x.shape[1:])
    x = torch.where(kept & (x < 0.3), -0.0, x)
    for direction in (layer, layer.inverse):
        y, _ = direction(x, cond)
        assert torch.equal(y[:, kept], x[:, kept])
        assert torch.equal(y[:, kept].signbit(), x[:, kept].signbit())
        assert (y[:, ~kept] != x[:, ~kept]).all()


def stays_wide_under_autocast(make, shape):
    """The network runs in half precision; state and log-determinant do not, and what is kept is untouched."""
    layer, x, cond = ready(make, shape, dtype=torch.float32)
    outputs = []
    layer.net.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z, logdet = layer(x.bfloat16(), cond)
        again, log_back = layer.inverse(z, cond)
    assert {output.dtype for output in outputs} == {torch.bfloat16}
    assert {z.dtype, logdet.dtype, again.dtype, log_back.dtype} == {torch.float32}
    # Both directions see the same network output, so half precision costs nothing more than its rounding there.
    params = outputs[0].float().reshape(len(x), layer.transform.params_per_dim, -1, *shape[1:])
    seen, x2, squares = layer.split.take(x.bfloat16().float())
    expected = layer.split.put(seen, *layer.transform(x2, params), squares)
    close(z, expected[0], 1e-6)
    close(logdet, expected[1].flatten(1).sum(1), 1e-6)
    close(again, x.bfloat16().float(), 1e-5)
    close(log_back, -logdet, 1e-5)
    layer.zero_grad()
    (z.square().sum() - logdet.sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("name", [name for name in COUPLINGS if "spline" not in name])
def test_keeps_its_part(name):
    keeps_its_part(*COUPLINGS[name])


@pytest.mark.parametrize("name", ["affine", "spline", "sequence affine", "checkerboard affine"])
def test_stays_wide_under_autocast(name):
    stays_wide_under_autocast(*COUPLINGS[name])


@every_coupling
def test_start(name):
    """The start is that of the transform: the identity, where it has one."""
    make, shape = COUPLINGS[name]
    layer = make().double()
    x = torch.randn((3, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cond = torch.arange(3) if layer.uses_cond else None
    bias = layer.net.last.bias.reshape(layer.transform.params_per_dim, -1)
    assert torch.equal(bias, layer.transform.start(layer.split.changed).double())
    z, logdet = layer(x, cond)
    if "sigmoid" in name:
        close(logdet, torch.full_like(logdet, -0.1268), 1e-4)
    else:
        close(z, x, 0.01 if "mixture" in name else 1e-12)
        close(logdet, torch.zeros_like(logdet), 0.01 if "mixture" in name else 1e-12)
    (z.square().sum() - logdet.sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    assert layer.net.last.weight.grad.any()


@pytest.mark.parametrize("direction", ["forward", "inverse"])
def test_compiles_without_a_break_with_a_mask(direction):
    """Without one, the table of test_bijection_table.py is compiled."""
    compiled_equals_eager(*COUPLINGS["sequence affine"], direction, "aot_eager")


@pytest.mark.slow
@every_coupling
@pytest.mark.parametrize("direction", ["forward", "inverse"])
def test_compiles_to_code(name, direction):
    compiled_equals_eager(*COUPLINGS[name], direction, "inductor")


def compiled_equals_eager(make, shape, direction, backend):
    layer, x, cond = ready(make, shape, dtype=torch.float32)
    mask = torch.arange(shape[-1]) < torch.tensor([shape[-1], 3, 1])[:, None, None] if len(shape) == 2 else None
    torch._dynamo.reset()
    runs = getattr(layer, direction)
    results = []
    for run in (runs, torch.compile(runs, fullgraph=True, backend=backend)):
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        z, logdet = run(inputs, cond, mask)
        (z.square().sum() + logdet.sum()).backward()
        results.append([z, logdet, inputs.grad, *(p.grad for p in layer.parameters())])
    for eager, compiled in zip(*results, strict=True):
        close(compiled, eager, 1e-5)


def test_condition_counts_and_learns():
    """Another label, another density; gradients reach a condition through the network."""
    layer, x, cond = ready(*COUPLINGS["labels"])
    assert (layer(x, cond)[1] != layer(x, (cond + 1) % 4)[1]).all()
    assert (layer.inverse(x, cond)[1] != layer.inverse(x, (cond + 1) % 4)[1]).all()
    (layer(x, cond)[1].sum() + layer.inverse(x, cond)[0].sum()).backward()
    assert layer.net.embedding.weight.grad[:3].any(dim=1).all() and not layer.net.embedding.weight.grad[3].any()


def test_many_steps_there_and_back():
    layers = [
        randomise(coupling(ChannelSplit(6, swap=number % 2 == 1), Affine(3)).double(), number) for number in range(32)
    ]
    flow = Compose(layers, (6,))
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        z, logdet = flow(x)
        again, log_back = flow.inverse(z)
    close(again, x, 1e-9)
    close(log_back, -logdet, 1e-9)


def test_every_other_pixel():
    squares = Checkerboard(1).squares(torch.zeros(1, 1, 3, 4))
    expected = [[(i + j) % 2 == 1 for j in range(4)] for i in range(3)]
    assert squares.tolist() == expected
    assert torch.equal(Checkerboard(1, parity=1).squares(torch.zeros(1, 1, 3, 4)), ~squares)


def test_network_sees_nothing_of_what_it_changes():
    layer, x, _ = ready(*COUPLINGS["checkerboard affine"])
    seen = []
    layer.net.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    squares = layer.split.squares(x)
    layer(x.masked_fill(~squares, float("nan")))
    assert torch.equal(seen[0], x * squares)


def test_parts_are_not_copied():
    x = torch.zeros(2, 5)
    for swap in (False, True):
        kept, changed, _ = ChannelSplit(5, swap=swap).take(x)
        assert (kept.shape[1], changed.shape[1]) == ((2, 3) if swap else (3, 2))
        assert kept.untyped_storage().data_ptr() == changed.untyped_storage().data_ptr() == x.data_ptr()


# ---- mutants ----


class Uncounted(Coupling):
    """The log-determinant of half of the batch's numbers."""

    def _forward(self, x, cond, mask):
        z, logdet = super()._forward(x, cond, mask)
        return z, logdet / 2


class Peeks(Coupling):
    """The network sees what it changes."""

    def _params(self, seen, x, cond, mask):
        return super()._params(seen + 0.3 * x[:, -seen.shape[1] :], x, cond, mask)


class Products(Checkerboard):
    """What is kept is multiplied by one and added to zero."""

    def put(self, seen, changed, log_derivative, squares):
        return seen * squares + changed * ~squares, log_derivative * ~squares


class EverySquare(Checkerboard):
    """The log-derivative of the kept pixels counts too."""

    def put(self, seen, changed, log_derivative, squares):
        return super().put(seen, changed, log_derivative, squares)[0], log_derivative


class EveryFrame(Coupling):
    """The log-determinant counts padding."""

    def _change(self, change, parts, params, mask):
        return super()._change(change, parts, params, None)


class BatchMean(Coupling):
    """Parameters that depend on the other rows."""

    def _params(self, seen, x, cond, mask):
        params = super()._params(seen, x, cond, mask)
        return params - 0.1 * params.mean(0)


class HalfPrecision(Coupling):
    """The scale is computed in what the network leaves."""

    def _params(self, seen, x, cond, mask):
        return self.net(seen, cond, mask).view(len(x), self.transform.params_per_dim, -1, *x.shape[2:])


@pytest.mark.parametrize("check, make, shape", [
    ("log-det forward", lambda: coupling(ChannelSplit(4), Affine(2), layer=Uncounted), (4,)),
    ("log-det forward", lambda: coupling(ChannelSplit(4), Affine(2), layer=Peeks), (4,)),
    ("round trip", lambda: coupling(ChannelSplit(4), Affine(2), layer=Peeks), (4,)),
    ("log-det forward", lambda: coupling(EverySquare(1), Affine(1), 2), (1, 2, 3)),
    ("masked log-det", lambda: coupling(ChannelSplit(3), Affine(1), 1, layer=EveryFrame), (3, 6)),
    ("rows independent", lambda: coupling(ChannelSplit(4), Affine(2), layer=BatchMean), (4,)),
])  # fmt: skip
def test_mutants_of_the_table(check, make, shape):
    assert check in check_bijection(make(), shape, compiler=None).failed


@pytest.mark.parametrize("check, make, shape", [
    (keeps_its_part, lambda: coupling(Products(1), Affine(1), 2), (1, 3, 3)),
    (stays_wide_under_autocast, lambda: coupling(ChannelSplit(4), Affine(2), layer=HalfPrecision), (4,)),
])  # fmt: skip
def test_mutants(check, make, shape):
    with pytest.raises(AssertionError):
        check(make, shape)


# ---- what is refused ----


@pytest.mark.parametrize("channels", [0, 1])
def test_nothing_to_couple(channels):
    with pytest.raises(ValueError, match=f"at least 2 channels or dimensions, got {channels}"):
        ChannelSplit(channels)


@pytest.mark.parametrize(
    "transform, in_channels, out_channels, message",
    [
        (Affine(3), 2, 4, "changes 2 channels, but its transform was built for 3"),
        (Affine(2), 2, 5, r"4 channels out \(2 parameters for each of 2\), got 5"),
        (RationalQuadraticSpline(bins=8), 2, 4, r"46 channels out \(23 parameters for each of 2\), got 4"),
        (Affine(2), 3, 4, "2 channels in, got 3"),
    ],
)
def test_parts_that_do_not_fit(transform, in_channels, out_channels, message):
    with pytest.raises(ValueError, match=message):
        Coupling(ChannelSplit(4), transform, Net(in_channels, out_channels))


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("affine", (3,), r"\(4, ...\), got \(3,\)"),
        ("checkerboard affine", (2, 4), r"\(2, H, W\) with two pixels or more, got \(2, 4\)"),
        ("checkerboard affine", (2, 1, 1), r"two pixels or more, got \(2, 1, 1\)"),
    ],
)
def test_events_that_do_not_fit(name, shape, message):
    layer = COUPLINGS[name][0]()
    for direction in (layer, layer.inverse):
        with pytest.raises(ValueError, match=message):
            direction(torch.zeros(2, *shape))


def test_conditions_that_do_not_fit():
    with pytest.raises(ValueError, match="needs cond"):
        COUPLINGS["labels"][0]()(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="leave cond out"):
        COUPLINGS["affine"][0]()(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))


def test_masks_that_do_not_fit():
    layer = COUPLINGS["sequence affine"][0]()
    with pytest.raises(ValueError, match="boolean"):
        layer(torch.zeros(2, 3, 6), mask=torch.ones(2, 1, 6))
    with pytest.raises(ValueError, match=r"shape \(B, 1, T\), got \(2, 3, 6\)"):
        layer(torch.zeros(2, 3, 6), mask=torch.ones(2, 3, 6, dtype=torch.bool))
    one_channel = torch.zeros(2, 1, 3, 3)
    with pytest.raises(ValueError, match=r"shape \(B, 1, T\), got \(2, 1, 3, 3\)"):
        COUPLINGS["checkerboard, other half"][0]()(one_channel, mask=one_channel == 0)


def test_parity():
    with pytest.raises(ValueError, match="parity 0 or 1, got 1 and 2"):
        Checkerboard(1, parity=2)


# ---- couplings whose network has a block of attention pass every check of bijections, for every kind of block ----


#: A coupling network does not know the height of its maps, and `none` is the business of other tests.
KINDS = [name for name in ATTENTION if name not in ("none", "mel")]
MAPS = [name for name in KINDS if 2 in ATTENTION[name].dims]
#: Scores that choose one key have no derivative in evaluation, where checks are made.
UNSEEN = {"hard": ("dead parameters",)}
SEQUENCES = [name for name in KINDS if 1 in ATTENTION[name].dims]


def attending(attention, dims, net=ConvNet, split=ChannelSplit):
    torch.manual_seed(0)
    split = split(4)
    seen = 4 if isinstance(split, Checkerboard) else split.kept
    element = Affine(split.changed)
    wide = element.params_per_dim * split.changed
    return Coupling(split, element, net(seen, wide, hidden=8, depth=1, dims=dims, attention=attention, heads=2))


@pytest.mark.parametrize("attention", MAPS)
def test_images(attention):
    report = check_bijection(attending(attention, 2), (4, 3, 5), compiler=None, without=UNSEEN.get(attention, ()))
    report.raise_if_failed()


@pytest.mark.parametrize("attention", SEQUENCES)
def test_sequences_with_masks(attention):
    report = check_bijection(attending(attention, 1), (4, 7), compiler=None, without=UNSEEN.get(attention, ()))
    report.raise_if_failed()
    assert report["padding"].status == report["masked content"].status == "passed"


@pytest.mark.parametrize("net", [ResidualConvNet, GatedConvNet])
@pytest.mark.parametrize("split", [ChannelSplit, Checkerboard])
def test_other_networks_and_splits(net, split):
    check_bijection(attending("swin2d", 2, net, split), (4, 4, 3), compiler=None).raise_if_failed()


def test_the_checks_notice_a_block_that_is_not_the_same_in_both_directions(monkeypatch):
    layer = attending("plain", 1)

    def restless(h, mask):
        return h + torch.randn_like(h)

    monkeypatch.setattr(type(layer.net), "attend", lambda self, h, mask: restless(h, mask))
    assert "round trip" in check_bijection(layer, (4, 7), compiler=None).failed


# ---- halves of the positions of a map ----


def faults_of_halves(kind, parity):
    """How often a position lies in another half than by its row and column, or comes back elsewhere."""
    keeps = {"rows": lambda i, j: i % 2 == parity, "columns": lambda i, j: j % 2 == parity,
             "checkerboard": lambda i, j: (i + j) % 2 == parity}[kind]  # fmt: skip
    x = torch.arange(2 * 4 * 6).view(1, 2, 4, 6)
    split = TokenSplit(2, kind, parity=parity)
    halves = split.take(x)[:2]
    wanted = [[[int(x[0, c, i, j]) for i in range(4) for j in range(6) if keeps(i, j) == kept] for c in range(2)]
              for kept in (True, False)]  # fmt: skip
    back, _ = split.put(*halves, torch.zeros(1), None)
    misplaced = sum(half.flatten(2)[0].tolist() != own for half, own in zip(halves, wanted, strict=True))
    return misplaced + int((back != x).sum())


@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize("kind", ["rows", "columns", "checkerboard"])
def test_halves_are_those_of_a_loop_and_come_back(kind, parity, monkeypatch):
    assert faults_of_halves(kind, parity) == 0
    if kind == "checkerboard":
        monkeypatch.setattr(TokenSplit, "_turned", lambda self, pairs: pairs)
        assert faults_of_halves(kind, parity) > 0


@pytest.mark.parametrize("make, words", [
    (lambda: TokenSplit(1, "diagonals"), "rows, columns or checkerboard"),
    (lambda: TokenSplit(1, "rows", parity=2), "parity 0 or 1"),
])  # fmt: skip
def test_halves_that_do_not_exist(make, words):
    with pytest.raises(ValueError, match=words):
        make()
