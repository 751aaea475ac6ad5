"""Recomputed activations: gradients of stored ones, in memory that does not grow, whatever the layers do."""

from __future__ import annotations

import contextlib
import gc
import math
import warnings
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from genmodels.flows import composition as memory
from genmodels.flows import replay
from genmodels.flows import replay as drift
from genmodels.flows.bijection import Bijection, Freeze, Inverse
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Coupling
from genmodels.flows.elementwise import Affine, MeanScale
from genmodels.flows.linear import Flip, InvertibleLinear
from genmodels.flows.multiscale import glow
from genmodels.flows.scaling import ActNorm, Logit
from genmodels.nn.condition import Condition
from genmodels.nn.perceptron import MLP
from tests.flows.gradients import both_modes, gradients, set_memory, worst
from tests.flows.table import (
    INSTANCES,
    autoregressive,
    channel_coupling,
    mixture,
    sequence_flow,
    spline,
    vector_coupling,
)
from tests.parameters import scattered
from tests.two_processes import fork, forked, joined

# ---- gradients ----


@pytest.mark.parametrize("name", INSTANCES)
def test_gradients_of_every_layer_are_those_of_stored_mode(name):
    instance = INSTANCES[name]
    torch.manual_seed(0)
    layers = [instance.make()]
    if layers[0].out_shape(instance.shape) == instance.shape:
        layers.append(instance.make())
    flow = scattered(Compose(layers, instance.shape).double())
    x = torch.rand(3, *instance.shape, dtype=torch.float64)
    cond = instance.conditions()
    cond = cond.double() if cond is not None and cond.is_floating_point() else cond
    assert worst(*both_modes(flow, x, cond), smallest=1e-6) < 1e-8  # a bias of keys cancels in softmax


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-8), (torch.float32, 1e-3)])
def test_glow(dtype, tolerance):
    torch.manual_seed(0)
    flow = scattered(glow((3, 16, 16), levels=3, steps=8, hidden=16), 0.02).to(dtype)
    assert worst(*both_modes(flow, torch.randn(4, 3, 16, 16, dtype=dtype))) < tolerance


class Forgetful(Coupling):
    """Its log-determinant is not part of what is recomputed."""

    def recompute(self, z, cond, mask):
        x, again, logdet = super().recompute(z, cond, mask)
        return x, again, logdet.detach()


class Severed(Coupling):
    """The gradient through what the network sees is lost."""

    def recompute(self, z, cond, mask):
        return super().recompute(z.detach(), cond, mask)


class Twisted(Coupling):
    """The inverse is not that of the forward map."""

    def recompute(self, z, cond, mask):
        return super().recompute(z * 1.001, cond, mask)


@pytest.mark.parametrize("kind", [Forgetful, Severed, Twisted])
def test_mutants(kind):
    def layer(swap):
        split = ChannelSplit(4, swap=swap)
        return kind(split, Affine(2), MLP(2, 4, hidden=8, depth=1))

    flow = scattered(Compose([layer(False), layer(True), layer(False)], (4,)).double())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert worst(*both_modes(flow, torch.randn(3, 4, dtype=torch.float64))) > 1e-4


def test_masks_that_change_on_the_way():
    flow = scattered(sequence_flow().double())
    mask = (torch.arange(8) < torch.tensor([8, 4, 4])[:, None])[:, None]
    torch.manual_seed(1)
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    found, expected = both_modes(flow, x.masked_fill(~mask, 0), None, mask)
    assert worst(found, expected) < 1e-8
    assert not found["x"].masked_select(~mask).any()
    hidden = gradients(set_memory(flow, "inverse"), x.masked_fill(~mask, math.nan), None, mask)
    assert all(torch.equal(hidden[name], found[name]) for name in found)


def test_nested_frozen_and_shared():
    torch.manual_seed(0)
    shared = vector_coupling(4, Affine)
    inner = Compose([ActNorm(4), shared, Flip(4)], (4,))
    frozen = Freeze(vector_coupling(4, Affine, swap=True))
    flow = scattered(Compose([inner, frozen, shared, Freeze(Compose([ActNorm(4), shared], (4,)))], (4,)).double())
    shared.requires_grad_(True)
    assert len(list(memory.flattened(flow))) == 7
    found, expected = both_modes(flow, torch.randn(3, 4, dtype=torch.float64))
    assert worst(found, expected) < 1e-8
    assert found["layers.1.bijection.net.head.weight"] is None
    assert found["layers.0.layers.1.net.head.weight"] is not None  # three layers' gradients in one


def test_layers_that_look_after_themselves():
    flow = scattered(Compose([Logit(0.05), glow((1, 4, 4), levels=2, steps=2, hidden=8)], (1, 4, 4)).double())
    set_memory(flow, "inverse")
    runs = []
    flow.layers[1].register_forward_hook(lambda *_: runs.append(1))
    found, expected = both_modes(flow, torch.rand(3, 1, 4, 4, dtype=torch.float64))
    assert worst(found, expected) < 1e-8
    assert len(runs) == 2  # once in each mode: the stages inside recompute, not the whole


def test_autocast_is_replayed():
    torch.manual_seed(0)
    flow = scattered(Compose([ActNorm(4), channel_coupling(4, Affine), ActNorm(4)], (4, 4, 4)), 0.05)
    seen = []
    flow.layers[1].net.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    x = torch.randn(3, 4, 4, 4)
    found, expected = both_modes(flow, x, context=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    assert seen == [torch.bfloat16] * 3
    assert all(p.grad.dtype == torch.float32 for p in flow.parameters())
    assert worst(found, expected) < 0.05
    without = gradients(set_memory(flow, "store"), x)
    assert worst(found, expected) < 0.3 * worst(without, expected)


def test_autocast_leaves_no_weights_without_gradients_behind():
    flow = scattered(Compose([vector_coupling(4, Affine)], (4,), memory="inverse"))
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        flow(x)
        flow.memory = "store"
        z, _ = flow(x)
    z.sum().backward()
    assert flow.layers[0].net.head.weight.grad is not None


def with_dropout():
    torch.manual_seed(0)
    layers = [vector_coupling(6, Affine, swap=bool(k % 2), net=MLP, dropout=0.4) for k in range(4)]
    layers[1:1] = [Generic(vector_coupling(6, Affine, dropout=0.4))]
    return scattered(Compose(layers, (6,)).double(), 0.4), torch.randn(8, 6, dtype=torch.float64)


class Generic(Inverse):
    """A layer without a way of its own to recompute: inverse first, then forward."""

    def __init__(self, bijection: Bijection):
        super().__init__(Inverse(bijection))


def test_dropout_is_replayed(monkeypatch):
    flow, x = with_dropout()

    def run(mode):
        return gradients(set_memory(flow, mode), x), torch.rand(1)

    found, drawn = run("inverse")
    expected, drawn_too = run("store")
    assert worst(found, expected) < 1e-8
    assert drawn == drawn_too  # the backward pass leaves the generators where it found them
    monkeypatch.setattr(replay.RandomState, "again", lambda _self: contextlib.nullcontext())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert worst(run("inverse")[0], expected) > 1e-2


def test_condition_and_input_without_gradients():
    flow = scattered(Compose([vector_coupling(4, Affine, cond=Condition("vector", 2)), ActNorm(4)], (4,)).double())
    x, cond = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    results = []
    for mode in ("inverse", "store"):
        set_memory(flow, mode).zero_grad()
        z, logdet = flow(x[0], cond)
        (z.sum() + logdet.sum()).backward()
        results.append({name: p.grad.clone() for name, p in flow.named_parameters()})
    assert worst(*results) < 1e-8
    flow.memory = "inverse"
    flow.requires_grad_(False)
    z, _ = flow(x[0], cond)
    assert not z.requires_grad
    cond.requires_grad_()
    flow(x[0], cond)[0].sum().backward()
    assert cond.grad.abs().max() > 0


def test_an_empty_batch():
    flow = scattered(Compose([ActNorm(4), vector_coupling(4, Affine)], (4,), memory="inverse"))
    assert gradients(flow, torch.zeros(0, 4))["x"].shape == (0, 4)


def test_only_one_output_is_used():
    flow = scattered(Compose([vector_coupling(4, Affine), ActNorm(4)], (4,)).double())
    x = torch.randn(3, 4, dtype=torch.float64)
    for pick in (0, 1):
        results = []
        for mode in ("inverse", "store"):
            set_memory(flow, mode).zero_grad()
            flow(x)[pick].sum().backward()
            results.append({name: p.grad for name, p in flow.named_parameters()})
        assert worst(*results) < 1e-8


# ---- refusals ----


class Normed(MLP):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.norm = nn.BatchNorm1d(self.in_channels)

    def forward(self, x, cond=None, mask=None):
        return super().forward(self.norm(x), cond, mask)


def test_batch_statistics_are_refused_by_name():
    layers = [ActNorm(4), vector_coupling(4, Affine, net=Normed)]
    Compose(layers, (4,))
    with pytest.raises(ValueError, match=r"layers\.1\.net\.norm \(BatchNorm1d\)"):
        Compose(layers, (4,), memory="inverse")
    with pytest.raises(ValueError, match="memory must be one of store, inverse"):
        Compose(layers, (4,), memory="none")


class SpectrallyNormed(MLP):
    def __init__(self, *arguments, old=False, **options):
        super().__init__(*arguments, **options)
        norm = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                norm(layer)


@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
@pytest.mark.parametrize("old", [False, True])
def test_spectral_norms_are_refused(old):
    layer = vector_coupling(4, Affine, net=partial(SpectrallyNormed, old=old))
    with pytest.raises(ValueError, match=r"layers\.0\.net\..*updates its state"):
        Compose([layer], (4,), memory="inverse")


def test_function_transforms_are_refused_with_the_way_out():
    flow = scattered(Compose([vector_coupling(4, Affine)], (4,), memory="inverse"))

    def total(x):
        return flow(x[None])[1].sum()

    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(RuntimeError, match="does not work under torch.func: use memory='store'"):
            transform(total)(torch.randn(4))
    flow.memory = "store"
    x = torch.randn(4, requires_grad=True)
    (expected,) = torch.autograd.grad(total(x), x)
    assert torch.allclose(torch.func.grad(total)(x.detach()), expected)


def test_second_derivatives_are_refused():
    flow = scattered(Compose([vector_coupling(4, Affine)], (4,), memory="inverse"))
    x = torch.randn(3, 4, requires_grad=True)
    score = torch.autograd.grad(flow(x)[1].sum(), x)[0]
    assert score.shape == x.shape
    with pytest.raises(RuntimeError, match="use memory='store' to train by scores"):
        torch.autograd.grad(flow(x)[1].sum(), x, create_graph=True)


def test_backward_twice_and_changed_parameters():
    flow = scattered(Compose([vector_coupling(4, Affine), ActNorm(4)], (4,), memory="inverse"))
    z, _ = flow(torch.randn(3, 4))
    first, second = (torch.autograd.grad(z.sum(), list(flow.parameters()), retain_graph=True, allow_unused=True)
                     for _ in range(2))  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a is not None)
    with torch.no_grad():
        flow.layers[1].bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_exchanged_parameters_are_noticed():
    flow = scattered(Compose([vector_coupling(4, Affine), ActNorm(4)], (4,), memory="inverse"))
    others = {name: p.detach().clone().requires_grad_() for name, p in flow.named_parameters()}
    z, _ = torch.func.functional_call(flow, others, (torch.randn(3, 4),))
    with pytest.raises(RuntimeError, match=r"layers\.1: its parameters"):
        z.sum().backward()


def test_hooks_see_the_whole_gradient_once():
    flow = scattered(Compose([vector_coupling(4, Affine), ActNorm(4)], (4,)).double())
    calls = []
    for p in flow.parameters():
        p.register_hook(lambda g: calls.append("tensor") or g * 3)
        p.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    x = torch.randn(3, 4, dtype=torch.float64)
    found, expected = both_modes(flow, x)
    assert worst(found, expected) < 1e-8
    count = len(list(flow.parameters()))
    assert sorted(calls) == ["accumulated"] * 2 * count + ["tensor"] * 2 * count


# ---- memory ----


def peak_bytes(work) -> int:
    """The most bytes alive at once during `work`, from the records of the allocator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    alive = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def activation_peak(steps: int, mode: str) -> int:
    """Of forward and backward of a chain of Glow's steps, without the gradients of the parameters."""
    torch.manual_seed(0)
    layers = [layer for _ in range(steps) for layer in (ActNorm(4), InvertibleLinear(4), channel_coupling(4, Affine))]
    flow = scattered(Compose(layers, (4, 8, 8), memory=mode), 0.02)
    x = torch.randn(128, 4, 8, 8)

    def work():
        z, logdet = flow(x)
        (z.square().sum() - logdet.sum()).backward()

    work()
    flow.zero_grad(set_to_none=True)
    return peak_bytes(work) - sum(p.numel() * p.element_size() for p in flow.parameters())


def flat(limit: float = 1.1):
    assert activation_peak(16, "inverse") < limit * activation_peak(4, "inverse")


def test_peak_memory_does_not_grow(monkeypatch):
    flat()
    assert activation_peak(16, "store") > 3 * activation_peak(4, "store")
    monkeypatch.setattr(drift.DriftGauge, "keep", lambda self, values: values[:2])  # views keep all rows alive
    with pytest.raises(AssertionError):
        flat()


def test_nothing_between_is_kept():
    layers = [vector_coupling(4, Affine, swap=bool(k % 2)) for k in range(3)]
    flow = scattered(Compose(layers, (4,), memory="inverse"))
    seen = []
    for layer in flow.layers:
        layer.register_forward_hook(lambda _m, _i, out: seen.append(weakref.ref(out[0])))
    z, _ = flow(torch.randn(3, 4))
    gc.collect()
    assert [reference() is not None for reference in seen] == [False, False, True]


# ---- layers that store their input ----


def test_costly_inverses_are_not_run(monkeypatch):
    def fail(*_):
        raise AssertionError("inverse was run")

    layers = [ActNorm(5), vector_coupling(5, mixture), autoregressive(5, MeanScale()), vector_coupling(5, spline)]
    flow = scattered(Compose(layers, (5,)).double(), 0.1)
    x = torch.randn(3, 5, dtype=torch.float64)
    expected = gradients(flow, x)
    flow.memory = "inverse"
    for layer in layers[1:3]:
        monkeypatch.setattr(layer, "_inverse", fail)
        monkeypatch.setattr(layer, "recompute", fail, raising=False)
    assert worst(gradients(flow, x), expected) < 1e-8


# ---- two processes ----


class Saturating(Bijection):
    """z = x / sqrt(1 + x^2): for large x the digits of x are gone."""

    def _forward(self, x, cond, mask):
        return x / (1 + x.square()).sqrt(), -1.5 * torch.log1p(x.square()).flatten(1).sum(1)

    def _inverse(self, z, cond, mask):
        return z / (1 - z.square()).sqrt(), -1.5 * torch.log1p(-z.square()).flatten(1).sum(1)


def saturating_flow():
    torch.manual_seed(0)
    return scattered(Compose([ActNorm(4), Saturating(), InvertibleLinear(4), vector_coupling(4, Affine)], (4,)))


def _train(rank: int, meet: str, out: str, parts, deaf: bool) -> None:
    """Two steps of one of two processes."""
    flow = set_memory(saturating_flow(), "inverse")
    if deaf:
        torch.distributed.all_reduce = lambda *_: None
    calls = []
    for p in flow.parameters():
        p.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    with joined(meet, rank), warnings.catch_warnings(record=True) as caught:
        parallel = nn.parallel.DistributedDataParallel(flow, broadcast_buffers=not deaf)
        warnings.simplefilter("always")
        steps = [gradients(parallel, parts[rank]) for _ in range(2)]
        del parallel  # before its process group: the last owner of a group waits for threads, which want the GIL
    messages = [str(warning.message) for warning in caught if "recomputed" in str(warning.message)]
    steps = [{name.removeprefix("module."): g for name, g in step.items() if name != "x"} for step in steps]
    torch.save((steps, flow.gauge.switched, messages, len(calls)), out)


def two_processes(tmp_path, parts, deaf: bool = False):
    paths, meet = [str(tmp_path / f"{rank}.pt") for rank in (0, 1)], str(tmp_path / "meet")
    forked(_train, *((rank, meet, paths[rank], parts, deaf) for rank in (0, 1)))
    return [torch.load(path, weights_only=True) for path in paths]


@fork
def test_two_processes_train_as_one(tmp_path):
    parts = torch.randn(2, 3, 4).unbind()
    (steps, _, messages, calls), (others, *_) = two_processes(tmp_path, parts)
    flow = saturating_flow()
    one, other = (gradients(flow, part) for part in parts)
    for step, same in zip(steps, others, strict=True):
        for name in step:
            assert torch.equal(step[name], same[name])
            torch.testing.assert_close(step[name], (one[name] + other[name]) / 2, rtol=1e-3, atol=1e-5)
    assert calls == 2 * len(list(flow.parameters())) and not messages


@fork
@pytest.mark.parametrize("lossy", [0, 1])
def test_two_processes_switch_together(tmp_path, lossy):
    parts = [torch.randn(3, 4) * (500 if rank == lossy else 0.1) for rank in (0, 1)]
    found = two_processes(tmp_path, parts)
    assert [switched.tolist() for _, switched, *_ in found] == [[False, True, False, False]] * 2
    assert [len(messages) for _, _, messages, _ in found] == [1, 0]  # the first process speaks for both
    flow = saturating_flow()
    one, other = (gradients(flow, part) for part in parts)
    expected = {name: (one[name] + other[name]) / 2 for name in found[0][0][1]}
    assert worst(found[0][0][1], expected) < 1e-3
    (tmp_path / "alone").mkdir()
    alone = two_processes(tmp_path / "alone", parts, deaf=True)
    assert alone[0][1].tolist() != alone[1][1].tolist()  # each for itself
