"""The parts of Jet: transformers as coupling networks, bounded scales, the order of couplings."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.flows.bases import StandardNormal
from genmodels.flows.coupling import ChannelSplit, Coupling, TokenSplit
from genmodels.flows.coupling_flows import ShiftScale, TokenNet, jet
from genmodels.flows.flow import Flow
from genmodels.nn.condition import Condition
from tests.parameters import kept_for_the_backward_pass, scattered

DOUBLE = torch.float64
TINY = {"width": 8, "depth": 1, "heads": 2}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def couplings(flow) -> list[Coupling]:
    return [layer for layer in flow.modules() if isinstance(layer, Coupling)]


def kinds(flow) -> list[str]:
    return [getattr(layer.split, "kind", "channels") for layer in couplings(flow)]


def test_the_scale_is_two_sigmoid_and_its_logarithm_the_log_derivative():
    x, params = drawn(2, 3, 4), drawn(2, 2, 3, 4, seed=1)
    x.requires_grad_()
    z, h = ShiftScale()(x, params)
    s, t = params.unbind(1)
    assert torch.allclose(z, (x + t) * 2 / (1 + (-s).exp()), atol=1e-14)
    assert torch.allclose(torch.autograd.grad(z.sum(), x)[0].log(), h, atol=1e-12) and h.max() < math.log(2)
    back, h_back = ShiftScale().inverse(z, params)
    assert torch.allclose(back, x, atol=1e-12) and torch.equal(h_back, -h)


def test_the_inverse_of_the_smallest_scales():
    """In float32 e^90 is infinite, but z e^90 need not be; and z = 0 is x = -t whatever the scale."""
    s = torch.tensor([-90.0, -90.0, -200.0, -800.0], requires_grad=True)
    params = torch.stack([s, torch.full_like(s, 2.0)])[None]
    x, h = ShiftScale().inverse(torch.tensor([[1e-38, 0.0, 0.0, 0.0]]), params)
    assert x[0].tolist() == pytest.approx([0.5e-38 * math.exp(90) - 2, -2, -2, -2]) and h.isfinite().all()
    assert torch.autograd.grad(x.sum(), s)[0].isfinite().all()


def test_the_network_sees_every_token_and_knows_their_places():
    torch.manual_seed(0)
    net = TokenNet(2, 4, **TINY).to(DOUBLE)
    torch.nn.init.normal_(net.transformer.leave.weight)
    x = drawn(1, 2, 3, 4)
    y = net(x)
    other = x.clone()
    other[..., 2, 3] += 1
    assert ((net(other) - y).abs().amax((0, 1)) > 1e-9).all()
    turned = net(x.flip(3)).flip(3)  # the same contents at other offsets
    assert (turned - y).abs().max() > 1e-6


def test_a_network_for_sequences_reads_columns():
    torch.manual_seed(0)
    net = TokenNet(2, 4, attention="rope", **TINY).to(DOUBLE)
    torch.nn.init.normal_(net.transformer.leave.weight)
    x = drawn(1, 2, 3, 4)
    by_hand = net.transformer(x.mT.flatten(2).mT).mT.view(1, 4, 4, 3).mT
    assert torch.equal(net(x), by_hand)


@pytest.mark.parametrize("shape, options, expected", [
    ((1, 8, 8), {"couplings": 6}, ["channels", "rows", "channels", "rows", "channels", "columns"]),
    ((1, 8, 8), {"couplings": 3, "spatial": 0}, ["channels"] * 3),
    ((1, 8, 8), {"couplings": 3, "spatial": 1}, ["rows", "rows", "columns"]),
    ((1, 6, 8), {"couplings": 4, "spatial": 1}, ["columns", "columns", "checkerboard", "checkerboard"]),
])  # fmt: skip
def test_the_order_of_couplings(shape, options, expected):
    flow = jet(shape, **options, **TINY)
    assert kinds(flow) == expected
    pairs = [(layer.split.kind, layer.split.parity) for layer in couplings(flow) if isinstance(layer.split, TokenSplit)]
    assert len(set(pairs)) == len(pairs)  # both halves of each kind are changed


def changed_by(flow, shape):
    """Which values of z depend on which of x, by autograd."""
    flow = flow.to(DOUBLE)
    flow.initialize(drawn(16, *shape))
    scattered(flow, 0.3, seed=3)
    jacobian = torch.autograd.functional.jacobian(lambda x: flow(x[None])[0][0].flatten(), drawn(*shape))
    return jacobian.flatten(1) != 0


def test_a_few_couplings_join_everything():
    shape = (1, 4, 4)
    source = torch.Generator().manual_seed(0)
    assert changed_by(jet(shape, couplings=12, generator=source, **TINY), shape).all()
    assert not changed_by(jet(shape, couplings=1, spatial=0, **TINY), shape).all()


def test_permutations_are_drawn_once_from_the_generator():
    orders = [jet((1, 8, 8), couplings=2, spatial=0, generator=torch.Generator().manual_seed(seed), **TINY)
              for seed in (0, 0, 1)]  # fmt: skip
    states = [{name: value for name, value in flow.state_dict().items() if name.endswith("index")}
              for flow in orders]  # fmt: skip
    assert states[0] and all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_recomputing_changes_no_gradient():
    torch.manual_seed(0)
    flow = jet((1, 4, 4), couplings=4, memory="store", generator=torch.Generator().manual_seed(0), **TINY).to(DOUBLE)
    flow.initialize(drawn(16, 1, 4, 4))
    scattered(flow, 0.1, seed=0)
    found = []
    for memory in ("store", "inverse"):
        flow.stages[0].memory = memory
        flow.zero_grad()
        z, logdet = flow(drawn(3, 1, 4, 4, seed=4))
        (z.square().sum() - logdet.sum()).backward()
        found.append([p.grad.clone() for p in flow.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-8, atol=1e-10) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("levels", [1, 2])
def test_recomputing_keeps_nothing_for_the_couplings(levels):
    """Nothing but two of sixteen items, by which the drift of every layer is measured."""
    x = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def kept(memory, couplings):
        flow = jet((1, 8, 8), couplings=couplings, levels=levels, memory=memory, **TINY)
        flow.initialize(x)
        return kept_for_the_backward_pass(flow, x)

    each = {memory: (kept(memory, 6) - kept(memory, 2)) / 4 for memory in ("store", "inverse")}
    assert each["inverse"] <= 0.3 and each["store"] > 20


@pytest.mark.parametrize("make, words", [
    (lambda: jet((2,)), "jet takes images .* use model=realnvp for vectors and model=glow for sequences"),
    (lambda: jet((1, 7, 8)), "patch=2 does not divide the sides of images of 7 x 8; these do: 1"),
    (lambda: jet((1, 8, 8), couplings=0), "couplings must be at least 1"),
    (lambda: jet((1, 12, 12), levels=3), "levels=3 cannot halve 6 x 6 patches .* smaller than patch=2"),
    (lambda: jet((1, 6, 6), couplings=2), "spatial=2 leaves no .* both sides of the 3 x 3 patches are odd"),
    (lambda: jet((1, 8, 8), couplings=2, spatial=3), "spatial=3 leaves no .* only 2 couplings, give a smaller one"),
    (lambda: jet((1, 8, 8), patch=1), "patch=1 leaves one channel, .* divides both sides of 8 x 8, or model=tarflow"),
    (lambda: jet((3, 8, 8), patch=1, levels=2), "an even number of channels .* patch=1 has 3"),
    (lambda: Flow(jet((1, 4, 4), couplings=2, cond=Condition("labels", 3), **TINY), StandardNormal((16,))).log_prob(
        torch.zeros(1, 1, 4, 4), torch.tensor([3])), "label 3 in row 0, the classes of this flow are 0..2"),
    (lambda: TokenNet(2, 4, cond=Condition("map", 2), **TINY), "conditioned on labels"),
    (lambda: TokenNet(2, 4, cond=Condition("labels", 2), **TINY)(torch.zeros(1, 2, 2, 2)), "needs cond"),
    (lambda: TokenNet(2, 4, **TINY)(torch.zeros(1, 2, 2, 2), torch.zeros(1).long()), "without a condition"),
    (lambda: TokenNet(2, 4, **TINY)(torch.zeros(1, 2, 2, 2), None, torch.ones(1, 1, 2).bool()), "have no mask"),
    (lambda: Coupling(ChannelSplit(4), ShiftScale(), TokenNet(2, 2, **TINY)), "4 channels out"),
])  # fmt: skip
def test_errors_are_one_line(make, words, refuses):
    refuses(ValueError, words, make)
