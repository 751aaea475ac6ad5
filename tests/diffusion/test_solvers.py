"""Solvers of ordinary differential equations against scipy, closed forms and their orders."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.errors import InputError
from genmodels.diffusion import solvers
from genmodels.diffusion.solvers import RK4, SOLVERS, AdaptiveRK45, Heun, ScipyRK45, SolverError


def uneven(s, y, rows):
    """Examples of unlike stiffness and scale, driven at different speeds."""
    rate = 1.0 + 4.0 * rows.double()
    return torch.cos(rate * s)[:, None] - rate[:, None] * torch.sin(y) * torch.exp(-s)[:, None]


START = torch.tensor([[0.0, 0.0], [1.0, -2.0], [1e-7, 10.0], [3.0, 0.5]], dtype=torch.float64)


@pytest.mark.parametrize("tolerance", [1e-3, 1e-6])
@pytest.mark.parametrize("start, end", [(0.0, 3.0), (3.0, -0.5)])
def test_each_example_takes_the_steps_that_scipy_takes_for_it_alone(start, end, tolerance):
    ours = AdaptiveRK45(tolerance=tolerance)(uneven, START, start, end)
    theirs = ScipyRK45(tolerance=tolerance)(uneven, START, start, end)
    assert torch.equal(ours.evaluations, theirs.evaluations)
    assert torch.allclose(ours.y, theirs.y, rtol=0, atol=1e-12)
    assert len(ours.evaluations.unique()) > 1  # the examples do differ


def test_that_check_catches_an_error_norm_over_the_batch(monkeypatch):
    monkeypatch.setattr(solvers, "_rms", lambda x: x.square().mean().sqrt().expand(len(x)))
    ours = AdaptiveRK45(tolerance=1e-5)(uneven, START, 0.0, 3.0)
    theirs = ScipyRK45(tolerance=1e-5)(uneven, START, 0.0, 3.0)
    assert not torch.equal(ours.evaluations, theirs.evaluations)


def test_an_example_does_not_depend_on_its_batch():
    whole = AdaptiveRK45()(uneven, START, 0.0, 3.0)
    for row in range(4):
        alone = AdaptiveRK45()(lambda s, y, rows, row=row: uneven(s, y, rows + row), START[row : row + 1], 0.0, 3.0)
        assert torch.equal(alone.y[0], whole.y[row]) and alone.evaluations[0] == whole.evaluations[row]


@pytest.mark.parametrize("name, order", [("heun", 2), ("rk4", 4)])
def test_fixed_steps_have_their_order(name, order):
    def spiral(s, y, rows):
        return torch.stack([-y[:, 1] * (1 + s), y[:, 0] * (1 + s)], 1)

    y, errors = torch.tensor([[1.0, 0.0]], dtype=torch.float64), []
    for steps in (20, 40, 80):
        found = SOLVERS[name](steps=steps)(spiral, y, 0.0, 2.0)
        angle = 4.0  # 2 + 2^2 / 2
        truth = torch.tensor([[math.cos(angle), math.sin(angle)]], dtype=torch.float64)
        errors.append(float((found.y - truth).norm()))
        assert int(found.evaluations) == order * steps
    assert abs(math.log2(errors[1] / errors[2]) - order) < 0.15


def test_that_check_catches_a_slope_taken_at_the_old_place(monkeypatch):
    def late(self, f, y, here, after):
        h = after - here
        first = f(here, y)
        return y + h / 2 * (first + f(here, y + h * first))

    monkeypatch.setattr(Heun, "_step", late)
    with pytest.raises(AssertionError):
        test_fixed_steps_have_their_order("heun", 2)


@pytest.mark.parametrize("solver", [AdaptiveRK45(), ScipyRK45(), RK4(steps=3)])
def test_a_value_that_is_not_finite_names_row_and_place(solver):
    def broken(s, y, rows):
        return torch.where((rows == 2)[:, None], math.nan, -y)

    with pytest.raises(SolverError, match="row 2: the derivative is not finite, at 0"):
        solver(broken, START, 0.0, 1.0)


def test_a_path_that_ends_before_its_time_is_an_error():
    def explosion(s, y, rows):  # y = 1 / (1 - s): no solution beyond s = 1
        return y**2

    with pytest.raises(SolverError, match="row 0: .* at (1|0.99)") as error:
        AdaptiveRK45()(explosion, torch.ones(1, 1, dtype=torch.float64), 0.0, 2.0)
    assert abs(error.value.at - 1) < 1e-3


def test_options_out_of_range_are_refused():
    for make in (lambda: AdaptiveRK45(tolerance=0.0), lambda: ScipyRK45(tolerance=-1.0), lambda: RK4(steps=0)):
        with pytest.raises(InputError):
            make()
