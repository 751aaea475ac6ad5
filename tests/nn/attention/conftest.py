"""The checks run over one table: a test with an argument `case` or `sequence_case` runs for each of its entries."""

from __future__ import annotations

import pytest

from tests.nn.attention.table import BY_NAME, CASES, MECHANISMS


def pytest_generate_tests(metafunc):
    """A test with an argument `case` runs over the table, one with `sequence_case` over the schemes for sequences,
    one with `mechanism` over the mechanisms outside the core."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES, ids=lambda case: case.name)
    if "sequence_case" in metafunc.fixturenames:
        metafunc.parametrize("sequence_case", [c for c in CASES if c.space is None], ids=lambda case: case.name)
    if "mechanism" in metafunc.fixturenames:
        metafunc.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)


@pytest.fixture
def table():
    """The cases by name."""
    return BY_NAME
