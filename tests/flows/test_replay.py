"""The gauge of recomputed inputs: what it notices, what it does about it, and what is kept of that."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from genmodels.core.errors import RunError
from genmodels.flows.bijection import Bijection
from genmodels.flows.composition import Compose
from genmodels.flows.elementwise import Affine
from genmodels.flows.linear import Flip
from genmodels.flows.multiscale import glow
from genmodels.flows.replay import DriftGauge, Health, LayerHealth, LayerInput, examine, smallest_scale
from genmodels.flows.scaling import ActNorm
from genmodels.flows.tarflow import tarflow
from tests.flows.gradients import gradients, worst
from tests.flows.table import checkerboard_coupling, vector_coupling
from tests.parameters import scattered


class Scale(Bijection):
    """z = s x + t, with a scale as small as one likes: what is added to s x takes its digits."""

    def __init__(self, scale: float, shift: float = 1.0):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(scale)), shift

    def _forward(self, x, cond, mask):
        return self.scale * x + self.shift, x.new_ones(len(x)) * self.scale.abs().log() * x[0].numel()

    def _inverse(self, z, cond, mask):
        return (z - self.shift) / self.scale, -z.new_ones(len(z)) * self.scale.abs().log() * z[0].numel()


def lossy_flow():
    torch.manual_seed(0)
    before, after = (scattered(vector_coupling(4, Affine, swap=swap), 0.3) for swap in (False, True))
    return Compose([before, ActNorm(4), Scale(1e-6), after], (4,)), torch.randn(16, 4)


def test_a_layer_that_loses_digits_stores_its_input_from_the_next_step_on():
    flow, x = lossy_flow()
    expected = gradients(flow, x)
    flow.memory = "inverse"
    with pytest.warns(UserWarning, match=r"layers\.2 \(Scale\): its input.*off by \d.*scale about 1\.0e-06") as caught:
        first = gradients(flow, x)
    assert len(caught) == 1
    assert worst(first, expected) > 1e-2
    assert flow.gauge.switched.tolist() == [False, False, True, False]  # the layers before it are not to blame
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert worst(gradients(flow, x), expected) < 1e-3


def test_without_the_gauge_gradients_stay_wrong():
    flow, x = lossy_flow()
    expected = gradients(flow, x)
    flow.memory = "inverse"
    flow.gauge.threshold = math.inf
    for _ in range(2):
        assert worst(gradients(flow, x), expected) > 1e-2
    assert not flow.gauge.switched.any()


def test_the_switch_is_saved_and_loaded():
    flow, x = lossy_flow()
    flow.memory = "inverse"
    average = copy.deepcopy(flow)
    with pytest.warns(UserWarning):
        gradients(flow, x)
    again, _ = lossy_flow()
    again.memory = "inverse"
    again.load_state_dict(flow.state_dict())
    expected = gradients(flow, x)
    found = gradients(again, x)  # no warning: it goes on as the other does
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for mine, theirs in zip(average.buffers(), flow.buffers(), strict=True):
        mine.copy_(theirs)
    assert average.gauge.switched.tolist() == flow.gauge.switched.tolist()
    again.load_state_dict({name: v for name, v in flow.state_dict().items() if not name.startswith("gauge")})
    assert not any(again.gauge.stores) and not again.gauge.switched.any()
    again.memory = "store"
    again.load_state_dict(flow.state_dict())


def test_evaluation_changes_nothing():
    flow, x = lossy_flow()
    flow.memory = "inverse"
    with pytest.warns(UserWarning, match="memory='store' gives exact ones"):
        gradients(flow.eval(), x)
    assert not flow.gauge.switched.any()


def test_drift_that_adds_up_is_cut_where_it_passes_the_threshold():
    gauge = DriftGauge(6)
    assert gauge.blamed([3e-3, 2e-3, 9e-4, 1e-3, 5e-4, 0.0]) == [1]
    assert gauge.blamed([2e-3, 0.0, 5e-3, 2e-4]) == [0, 2]
    assert gauge.blamed([1e-5, 2e-3]) == [1]


class Cliff(Bijection):
    """Its inverse is infinite for what comes out as zero."""

    def _forward(self, x, cond, mask):
        return x * 0.5, x.new_full((len(x),), math.log(0.5) * x[0].numel())

    def _inverse(self, z, cond, mask):
        return 2 * z + torch.log(z.abs().clamp(max=1e-3) * 1e3).clamp(max=0), -z.new_full((len(z),), math.log(0.5))


def test_values_that_are_not_finite_stop_the_run():
    flow = Compose([vector_coupling(4, Affine), Cliff(), Flip(4)], (4,), memory="inverse")
    x = torch.randn(8, 4)
    x[5, 3] = 0  # not one of the examples that are watched
    z, _ = flow(x)
    with pytest.raises(RunError, match=r"layers\.1 \(Cliff\): its input, recomputed from its output, is not finite"):
        z.sum().backward()
    assert all(p.grad is None for p in flow.parameters())


def test_a_flow_that_overflows_is_left_to_its_loss():
    flow = scattered(Compose([vector_coupling(4, Affine), ActNorm(4)], (4,), memory="inverse"))
    x = torch.randn(8, 4)
    x[6] = math.inf
    flow(x)[0].sum().backward()
    assert not flow.gauge.switched.any()


def test_smallest_scale_is_that_of_the_jacobian():
    torch.manual_seed(0)
    layer = scattered(checkerboard_coupling(1, 0, Affine).double(), 0.3)
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: layer(x)[0].flatten(), x).view(32, 32)
    assert smallest_scale(LayerInput(layer, x), rounds=200) == pytest.approx(
        float(torch.linalg.eigvals(jacobian).abs().min()), rel=0.02
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_layer_without_a_finite_inverse_is_in_the_extremes(order):
    both = [LayerHealth("a", "Cliff", math.nan, 1.0, math.nan, 2.0), LayerHealth("b", "Flip", 1e-6, 0.5, 1.0, 1.0)]
    found = Health(0.0, tuple(both[k] for k in order)).figures()
    assert all(math.isnan(found[key]) for key in ("layer_drift", "smallest_singular_value"))
    assert (found["log_scale"], found["condition"], found["round_trip"]) == (1.0, 2.0, 0.0)


@pytest.mark.parametrize("build", [
    lambda memory: glow((3, None), levels=2, steps=1, hidden=8, memory=memory),
    lambda memory: tarflow((3, None), patch=2, blocks=2, width=8, depth=1, heads=2, memory=memory)])
def test_sequences_of_no_length_have_a_density_of_one(build):
    for memory in ("store", "inverse"):
        flow = build(memory)
        flow.initialize(torch.randn(4, 3, 8))
        x = torch.zeros(2, 3, 0, requires_grad=True)
        z, logdet = flow(x)
        (z.sum() + logdet.sum()).backward()
        assert z.numel() == 0 and logdet.tolist() == [0.0, 0.0]


def test_an_empty_batch_has_no_health(refuses):
    refuses(ValueError, r"examine needs data, got \(0, 2\)", examine, Compose([ActNorm(2)], (2,)), torch.zeros(0, 2))
