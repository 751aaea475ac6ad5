"""Checks of bijections: each mutant fails exactly the checks it must, sound layers fail none."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import logsigmoid

from genmodels.flows.bijection import Bijection, Freeze, Inverse, Step, full_precision
from genmodels.flows.composition import Compose
from genmodels.flows.linear import Flip
from genmodels.flows.multiscale import glow
from genmodels.flows.scaling import Logit, Shift
from genmodels.verification import bijections as jacobian_checks
from genmodels.verification import maps as map_checks
from genmodels.verification.bijections import CHECKS, check_bijection
from genmodels.verification.check import NOT_APPLICABLE, NOT_VERIFIED, CheckFailed
from genmodels.verification.subject import draw, draw_far, perturb, prepare, ranges
from tests.mutants.bijections import MUTANTS
from tests.mutants.bijections_couplings import Bend, Couple
from tests.mutants.bijections_layers import ClampedFarOut, FlippedSigns, Offset, PlainFlag, Stretch

NO_COMPILER = {"compiler": None}


@pytest.mark.parametrize("name", MUTANTS)
def test_exactly_the_right_checks_fail(name):
    mutant = MUTANTS[name]
    torch.manual_seed(0)
    report = mutant.run()
    assert set(report.failed) == mutant.failing, str(report)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
@pytest.mark.parametrize("name", MUTANTS)
def test_whatever_the_seed(name, seed):
    mutant = MUTANTS[name]
    torch.manual_seed(seed)
    report = mutant.run(compiler=None, seed=seed)
    assert set(report.failed) == mutant.failing - {"compiled"}, str(report)


def test_every_check_has_a_mutant():
    assert set().union(*(mutant.failing for mutant in MUTANTS.values())) == set(CHECKS.specs)


class Asinh(nn.Module):
    """A sound layer of plain torch, its log-determinant multiplied by a factor or, at 1, right."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return torch.asinh(x), -self.factor * 0.5 * torch.log1p(x.square()).flatten(1).sum(1)

    def inverse(self, z):
        return torch.sinh(z), self.factor * torch.log(torch.cosh(z)).flatten(1).sum(1)


@pytest.mark.parametrize("factor, said", [(-1.0, "its sign is wrong"), (1 / 6, "number of positions is missing"),
                                          (1 / 18, "mean in the place of a sum"), (1.3, None)])
def test_the_usual_mistakes_are_named(factor, said):
    assert not check_bijection(Asinh(), (3, 2, 3), **NO_COMPILER).failed  # nobody promised it half precision
    report = check_bijection(Asinh(factor), (3, 2, 3), **NO_COMPILER)
    assert {"log-det forward", "log-det inverse"} <= set(report.failed)
    assert (said or "says") in str(report) and (said is not None or "(it" not in str(report))


# ---- what is checked, and how ----


def test_the_layer_itself_is_not_touched():
    layer = PlainFlag(3)
    before = copy.deepcopy(layer.state_dict())
    check_bijection(layer, (3, 4, 4), **NO_COMPILER)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert not layer.initialized and layer.training and layer.log_scale.dtype == torch.float32


def test_parameters_are_moved_unless_asked_otherwise():
    offset = FlippedSigns(3)  # at the start log |det| = 0, whatever the sign
    assert check_bijection(offset, (3, 2, 2), randomise=False, **NO_COMPILER).passed
    assert not check_bijection(offset, (3, 2, 2), **NO_COMPILER).passed


class Plain(nn.Module):
    """A user's own module: no base class, neither condition nor mask."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x * self.log_scale.exp(), self.log_scale.sum().expand(len(x)).clone()

    def inverse(self, z):
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        return z * (-self.log_scale).exp(), -self.log_scale.sum().expand(len(z)).clone()


class Turned(Bijection):
    """A fixed rotation, whose log-determinant is 0 as long as nothing moves it."""

    constant_logdet = True

    def __init__(self):
        super().__init__()
        turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).double())[0]
        self.turn = nn.Parameter(turn, requires_grad=False)
        self.shift = nn.Parameter(torch.zeros(3))

    def _forward(self, x, cond, mask):
        with full_precision(x):
            return x @ self.turn.to(x.dtype).T + self.shift, x.new_zeros(len(x))

    def _inverse(self, z, cond, mask):
        return torch.linalg.solve(self.turn.to(z.dtype), (z - self.shift).T).T, z.new_zeros(len(z))


class Exponential(Bijection):
    """From the line to the positive numbers."""

    def _forward(self, x, cond, mask):
        return x.exp(), x.sum(1)

    def _inverse(self, z, cond, mask):
        return z.log(), -z.log().sum(1)


class Squash(Bijection):
    """The sigmoid, from the line to (0, 1)."""

    def _forward(self, x, cond, mask):
        return x.sigmoid(), (logsigmoid(x) + logsigmoid(-x)).sum(1)

    def _inverse(self, z, cond, mask):
        return z.logit(), -(z.log() + (-z).log1p()).sum(1)


class SquashAlone(Squash):
    """The same, with its own domain."""

    z_range = (0.0, 1.0)


@pytest.mark.parametrize("make, options", [
    (Turned, {}),
    (Squash, {"z_range": (0.0, 1.0)}),
    (SquashAlone, {}),
    (lambda: Inverse(SquashAlone()), {}),
    (Exponential, {"z_range": (1e-6, math.inf), "x_range": (-10.0, 10.0)}),
    (lambda: Inverse(Exponential()), {"x_range": (1e-6, math.inf), "z_range": (-10.0, 10.0)}),
])
def test_right_layers_pass(make, options):
    check_bijection(make(), (3,), **options).raise_if_failed()


def test_inputs_lie_within_a_single_end():
    generator = torch.Generator().manual_seed(0)
    low, high = (draw((1000, 2), limits, generator) for limits in ((2.0, math.inf), (-math.inf, 2.0)))
    assert 2 < float(low.min()) < 2.1 and float(low.max()) > 20 and -20 > float(high.min()) and float(high.max()) < 2


def test_a_log_det_that_is_not_a_number_is_noticed_in_any_row():
    x = torch.randn(2, 3, dtype=torch.float64)
    for row in (0, 1):
        logdet = torch.zeros(2, dtype=torch.float64)
        logdet[row] = math.nan
        layer = Flip(3)
        assert math.isnan(map_checks._against_jacobian(Step("", layer, x, x.flip(1), logdet, None, None), slice(0, 2)))


def test_hard_attention_learns_in_training_alone():
    flow = glow((1, 8, 8), levels=1, steps=1, hidden=8, attention="hard", heads=2)
    report = check_bijection(flow, (1, 8, 8), only=["dead parameters"])
    report.raise_if_failed()


def test_a_module_that_is_no_bijection_of_ours():
    report = check_bijection(Plain(), (4,), compiler="eager").raise_if_failed()
    assert report["padding"].status == NOT_APPLICABLE and report["log-det forward"].status == "passed"
    assert check_bijection(Plain(), (3, 4), only=["padding"])["padding"].note == "takes no masks"


class OneLogTwo(Plain):
    """z = 2 x + 1 with the log-determinant of a single value."""

    def forward(self, x):
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return 2 * x + 1, torch.full_like(x[:, :1].flatten(1)[:, 0], math.log(2))

    def inverse(self, z):
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        return (z - 1) / 2, torch.full_like(z[:, :1].flatten(1)[:, 0], -math.log(2))


class SquareCount(Stretch):
    """Counts H W positions as H H, which squares cannot tell."""

    def _forward(self, x, cond, mask):
        z, logdet = super()._forward(x, cond, mask)
        return z, logdet * x.shape[2] / x.shape[3]

    def _inverse(self, z, cond, mask):
        x, logdet = super()._inverse(z, cond, mask)
        return x, logdet * z.shape[2] / z.shape[3]


LOG_DETS = ["log-det forward", "log-det inverse"]


@pytest.mark.parametrize("shape", [(300,), (1, 28, 28)])
def test_a_wrong_log_det_of_a_large_event_is_noticed(shape):
    report = check_bijection(OneLogTwo(), shape, only=LOG_DETS)
    assert report.failed == LOG_DETS and f"is {math.log(2) * math.prod(shape):.9g}" in report[LOG_DETS[0]].note


def test_large_events_are_cropped_to_what_is_not_square():
    report = check_bijection(Offset(3), (3, 64, 64), only=LOG_DETS)
    assert report.failed == LOG_DETS and "at (3, 10, 8)" in report["log-det forward"].note
    assert check_bijection(SquareCount(3), (3, 64, 64), only=LOG_DETS).failed == LOG_DETS
    assert check_bijection(Stretch(3), (3, 64, 64), only=LOG_DETS).passed
    assert check_bijection(Couple(400), (400,), only=LOG_DETS).passed


def test_what_is_too_large_is_not_verified():
    report = check_bijection(OneLogTwo(), (5000,), only=[*LOG_DETS, "round trip"])
    assert report.unverified == LOG_DETS and not report.failed and not report.passed
    assert "2 not verified, 1 passed" in str(report) and "too large" in report["log-det forward"].note
    assert report.to_dict()["passed"] is False
    with pytest.raises(CheckFailed, match="log-det inverse  NOT VERIFIED"):
        report.raise_if_failed()
    slow = check_bijection(Couple(400), (400,), only=LOG_DETS, patience=1e-9)
    assert slow.unverified == LOG_DETS and "more patience" in slow["log-det forward"].note
    # A module that does not say which events it takes cannot be convicted by a part of one.
    doubtful = check_bijection(OneLogTwo(), (2, 64, 64), only=LOG_DETS)
    assert doubtful.unverified == LOG_DETS and "says 0.693147181" in doubtful["log-det forward"].note


def test_jacobian_of_a_known_map():
    subject = prepare(Compose([Stretch(2)], (2, 2)), (2, 2), batch=2, randomise=True, seed=0)
    scale = subject.layer.layers[0].log_scale.exp().repeat_interleave(2)
    found = jacobian_checks.jacobian(subject, subject.x, None, 1, False)
    assert torch.allclose(found, torch.diag(scale), atol=1e-14)


def test_where_the_logit_is_defined():
    line, unit = (-math.inf, math.inf), (0.0, 1.0)
    assert ranges(Compose([Logit(), Shift(1.0)], (2,))) == (unit, line)
    assert ranges(Inverse(Compose([Logit(), Shift(1.0)], (2,)))) == (line, unit)
    assert ranges(Freeze(Logit())) == (unit, line) and ranges(Compose([], (2,))) == (line, line)
    check_bijection(Compose([Logit(), Shift(1.0)], (2, 3, 3)), (2, 3, 3), **NO_COMPILER).raise_if_failed()


def test_a_composition_may_say_its_own_domain():
    class Root(Compose):
        x_range = (0.0, 4.0)

    assert ranges(Root([Shift(1.0)], (2,))) == ((0.0, 4.0), (-math.inf, math.inf))
    assert ranges(Inverse(Root([Logit()], (2,)))) == ((-math.inf, math.inf), (0.0, 4.0))


def test_own_inputs_and_conditions_are_used():
    x = torch.full((2, 4), 2.0)
    wrong = {"round trip": 1e-300}
    report = check_bijection(Couple(cond=1), (4,), x=x, cond=torch.tensor([[1.0], [2.0]]), only=["round trip"],
                             tolerances=wrong)
    assert report["round trip"].tolerance == 1e-300
    same = check_bijection(Couple(cond=1), (4,), x=x, cond=torch.ones(2, 1), only=["condition"])
    assert same["condition"].status == NOT_APPLICABLE and "same condition" in same["condition"].note
    with pytest.raises(ValueError, match="Couple is given a condition, but its uses_cond is false"):
        check_bijection(Couple(), (4,), cond=torch.ones(2, 1), only=["condition", "round trip"])


def test_a_log_det_that_is_not_a_number_far_out_fails():
    class Lost(nn.Module):
        def forward(self, x, cond=None, mask=None):
            far = x.abs().amax(1)
            return x.clone(), torch.where((far > 8) & (far < 45), math.nan, x.new_zeros(len(x)))

        inverse = forward

    report = check_bijection(Lost(), (4,), only=["log-det forward", "log-det inverse"])
    assert report.failed == ["log-det forward", "log-det inverse"] and "far out: says nan" in str(report)


def test_what_follows_from_a_wrong_domain_is_not_said():
    report = check_bijection(Inverse(Logit()), (3,), z_range=(-math.inf, math.inf), compiler=None)
    assert report.failed == ["round trip"] and "give z_range" in report["round trip"].note
    assert {check.status for check in report.checks[1:]} == {NOT_VERIFIED}
    assert check_bijection(Inverse(Logit()), (3,), compiler=None).passed


def test_a_permutation_with_an_order_is_not_autoregressive():
    class Permuted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("order", torch.tensor([2, 0, 3, 1]))

        def forward(self, x, cond=None, mask=None):
            return x[:, self.order], x.new_zeros(len(x))

        def inverse(self, z, cond=None, mask=None):
            return z[:, self.order.argsort()], z.new_zeros(len(z))

    report = check_bijection(Permuted(), (4,), compiler=None)
    assert report.passed and report["triangular Jacobian"].status == NOT_APPLICABLE


def test_checks_may_be_chosen_by_an_iterator():
    class Wrong(Stretch):
        def _forward(self, x, cond, mask):
            z, logdet = super()._forward(x, cond, mask)
            return z, logdet + 1

    for only in (["log-det forward"], iter(["log-det forward"]), {"log-det forward": 1}):
        assert not check_bijection(Wrong(3), (3,), only=only, compiler=None).passed
    kept = check_bijection(Stretch(3), (3,), without=iter(["round trip"]), compiler=None)
    assert "round trip" not in [check.name for check in kept.checks] and len(kept.checks) > 5


def test_what_cannot_be_checked_is_an_error():
    with pytest.raises(ValueError, match="no check is left to run"):
        check_bijection(Stretch(3), (3,), only=[])
    with pytest.raises(ValueError, match="no check is left to run"):
        check_bijection(Stretch(3), (3,), only=["round trip"], without=["round trip"])
    with pytest.raises(TypeError, match="the class Stretch is no layer: give an instance"):
        check_bijection(Stretch, (3,))
    with pytest.raises(TypeError, match="an event shape is a tuple"):
        check_bijection(Stretch(3), 3)
    with pytest.raises(ValueError, match=r"x_range must be \(low, high\) with low < high"):
        check_bijection(Stretch(3), (3,), x_range=(1, 0))
    with pytest.raises(ValueError, match="did you mean 'round trip'"):
        check_bijection(Stretch(3), (3,), only=["round-trip"])
    with pytest.raises(ValueError, match="there is no check 'colour'"):
        check_bijection(Stretch(3), (3,), tolerances={"colour": 1.0})
    with pytest.raises(ValueError, match="needs a condition"):
        check_bijection(Couple(cond=2), (4,))
    with pytest.raises(ValueError, match="Bijection: forward is not implemented"):
        check_bijection(Bijection(), (3,))
    with pytest.raises(ValueError, match=r"Stretch: events need at least one dimension: \(1,\) for single numbers"):
        check_bijection(Stretch(1), ())
    with pytest.raises(ValueError, match="at least two examples"):
        check_bijection(Stretch(3), (3,), batch=1)
    with pytest.raises(ValueError, match=r"events of shape \(3,\), not \(4,\)"):
        check_bijection(Stretch(3), (4,), x=torch.zeros(2, 3))


def test_a_layer_that_raises_fails_the_check_it_raises_in():
    class Raising(Stretch):
        def _forward(self, x, cond, mask):
            if self.training:
                raise RuntimeError("no training")
            return super()._forward(x, cond, mask)

    report = check_bijection(Raising(3), (3, 2), only=["round trip", "training mode"])
    assert report.failed == ["training mode"] and "raised RuntimeError" in report["training mode"].note


def test_what_no_check_can_run_on_is_one_error():
    with pytest.raises(ValueError, match=r"Stretch: forward fails on events of shape \(4, 2\): RuntimeError: The size"):
        check_bijection(Stretch(3), (4, 2))

    class Alone(Plain):
        def forward(self, x):
            return super().forward(x)[0]

    class Half(Stretch):
        def _inverse(self, z, cond, mask):
            return super()._inverse(z, cond, mask)[0]

    with pytest.raises(ValueError, match=r"Alone: forward must return a pair \(result, .*\), got a Tensor"):
        check_bijection(Alone(), (4,))
    with pytest.raises(ValueError, match=r"Half: inverse .* Half must return a pair \(result, .*\), got a Tensor"):
        check_bijection(Half(3), (3,))


def test_a_domain_that_nobody_named():
    report = check_bijection(Squash(), (3,), **NO_COMPILER)
    assert "inverse is not finite at -" in report["round trip"].note and "give z_range" in report["round trip"].note
    assert "full_precision" not in report["bf16 autocast"].note


def test_far_out_is_what_was_drawn_alone():
    """Inputs that were given stand for the domain; far from them a trained flow may be badly conditioned."""
    x = torch.randn(3, 3)
    options = {"only": ["round trip", "log-det forward"], "x": x, "z": x, "randomise": False}
    assert check_bijection(ClampedFarOut(3), (3,), **options).passed
    assert draw_far((2, 100), (-math.inf, math.inf), torch.Generator()).shape == (3, 2, 100)
    assert float(draw_far((3,), (2.0, math.inf), torch.Generator().manual_seed(0)).min()) > 2


def test_watching():
    seen = []
    check_bijection(Stretch(3), (3,), only=["float32", "round trip"], watch=lambda check: seen.append(check.name))
    assert seen == ["round trip", "float32"]


@pytest.mark.parametrize("amount", [0.3])
def test_perturbation_moves_everything_and_keeps_rotations_invertible(amount):
    layer = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Conv2d(3, 5, 3)})
    nn.init.orthogonal_(layer["a"].weight)
    before = copy.deepcopy(layer.state_dict())
    perturb(layer, torch.Generator().manual_seed(0), amount)
    assert all((before[name] != value).all() for name, value in layer.state_dict().items())
    assert torch.linalg.svdvals(layer["a"].weight.detach()).min() > 0.1


class Spikes(Stretch):
    """z = x + 0.999 sin(40 x) / 40: as steep as a spline with narrow bins, inverted by bisection."""

    exact_inverse = False

    def _forward(self, x, cond, mask):
        return x + 0.999 * torch.sin(40 * x) / 40, (1 + 0.999 * torch.cos(40 * x)).log().flatten(1).sum(1)

    def _inverse(self, z, cond, mask):
        low, high = z - 0.1, z + 0.1
        for _ in range(60):
            middle = (low + high) / 2
            below = middle + 0.999 * torch.sin(40 * middle) / 40 < z
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return low, -self._forward(low, cond, mask)[1]


@pytest.mark.parametrize("layer", [Spikes(2), Bend()])
def test_densities_with_peaks_and_knots_have_mass_one(layer):
    found = check_bijection(layer, (2,), only=["integrates to one"])["integrates to one"]
    assert found.status == "passed" and found.error < 3e-4


class Kinked(Couple):
    """z_2 = x_2 + relu(x_1 - 2e-5): a kink that a step of finite differences from zero reaches along some ways."""

    def _forward(self, x, cond, mask):
        return torch.stack([x[:, 0], x[:, 1] + (x[:, 0] - 2e-5).relu()], 1), x.new_zeros(len(x))

    def _inverse(self, z, cond, mask):
        return torch.stack([z[:, 0], z[:, 1] - (z[:, 0] - 2e-5).relu()], 1), z.new_zeros(len(z))


@pytest.mark.parametrize(("ways", "right"), [(1, False), (5, True)])
def test_a_kink_nearby_is_no_wrong_gradient(monkeypatch, ways, right):
    monkeypatch.setattr(jacobian_checks, "_DIRECTIONS", ways)
    monkeypatch.setattr(jacobian_checks, "_STEPS", (1e-5,))
    zero = torch.zeros(3, 2)
    reports = [check_bijection(Kinked(2), (2,), x=zero, z=zero, only=["gradients"], seed=seed) for seed in range(30)]
    assert all(report.passed for report in reports) == right


# ---- reports ----


def test_a_report_in_words():
    torch.manual_seed(0)
    report = check_bijection(Offset(3), (3, 2, 2), **NO_COMPILER)
    text = str(report)
    assert text.startswith("Offset (3, 2, 2): 2 failed, ") and "FAILED" in text and "1e-08" in text
    assert "autograd" not in text and "says" in report["log-det forward"].note
    with pytest.raises(CheckFailed, match="log-det forward") as caught:
        report.raise_if_failed()
    assert "round trip" not in str(caught.value)
    plain = report.to_dict()
    assert plain["passed"] is False and {check["status"] for check in plain["checks"]} == {
        "passed", "failed", "not applicable"
    }


@pytest.mark.parametrize(
    ("found", "true", "error"),
    [((1.0, 3.0), (1.0, 4.0), 0.2), ((math.nan,), (1.0,), math.inf), ((1.0,), (1.0, 1.0), math.inf), ((), (), 0.0)],
)
def test_relative_error(found, true, error):
    assert map_checks.relative(torch.tensor(found), torch.tensor(true)) == pytest.approx(error)


class Planar(Stretch):
    """A map without an inverse in closed form."""

    def _inverse(self, z, cond, mask):
        raise NotImplementedError


class DropsInItsNetwork(nn.Module):
    """A sound coupling of a network with dropout that is no module."""

    def __init__(self):
        super().__init__()
        self.net = nn.TransformerEncoderLayer(4, 1, 8, dropout=0.5, batch_first=True)

    def shift(self, x):
        """From the first number."""
        return self.net(x[:, :1].expand(-1, 4)[:, None])[:, 0, :1]

    def forward(self, x, cond=None, mask=None):
        return torch.cat([x[:, :1], x[:, 1:] + self.shift(x)], 1), x.new_zeros(len(x))

    def inverse(self, z, cond=None, mask=None):
        return torch.cat([z[:, :1], z[:, 1:] - self.shift(z)], 1), z.new_zeros(len(z))


def test_checks_of_one_direction_need_no_inverse():
    report = check_bijection(Planar(3), (3,), only=["log-det forward", "round trip"])
    assert report.failed == ["round trip"]
    turned = check_bijection(Inverse(Planar(3)), (3,), only=["log-det inverse", "round trip"])
    assert turned.failed == ["round trip"]


def test_dropout_of_a_network_is_no_fault_in_training_mode():
    assert check_bijection(DropsInItsNetwork(), (2,), only=["training mode", "round trip"]).failed == []
