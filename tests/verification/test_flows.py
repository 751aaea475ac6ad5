"""Checks of flows beyond their bijection: each has a mutant that fails it."""

from __future__ import annotations

import pytest

from genmodels.verification.flows import FLOW_CHECKS
from tests.mutants.models import FLOW_MUTANTS


@pytest.mark.parametrize("name", FLOW_MUTANTS)
def test_exactly_the_right_checks_fail(name):
    checks = FLOW_MUTANTS[name].run()
    assert {check.name for check in checks if check.failed} == FLOW_MUTANTS[name].failing, checks


def test_every_check_has_a_mutant():
    assert set().union(*(mutant.failing for mutant in FLOW_MUTANTS.values())) == set(FLOW_CHECKS.specs)
