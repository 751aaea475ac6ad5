"""Several processes: every index exactly once, and what one of them says is heard."""

from __future__ import annotations

import os

import pytest
import torch

from genmodels.core.errors import InputError, RunError
from genmodels.core.likelihood import Likelihood
from genmodels.evaluation.cache import blocks, in_processes, strided


def values_of(indices: torch.Tensor) -> Likelihood:
    return Likelihood(-indices.double(), "exact", 3, 4, index=indices)


@pytest.mark.parametrize("count, processes", [(101, 2), (3, 4), (8, 3)])
def test_every_index_comes_back_once(count, processes):
    whole = Likelihood.concatenate([values_of(share) for share in strided(count, processes)]).in_index_order()
    assert torch.equal(whole.nats, -torch.arange(count).double())
    assert sorted(k for first, n in blocks(count, processes) for k in range(first, first + n)) == list(range(count))


def test_a_sampler_that_pads_is_caught():
    padded = strided(101, 2)
    padded[1] = torch.cat([padded[1], padded[0][:1]])  # as many for each, the way training likes it
    with pytest.raises(RunError, match="repeated \\[0\\]"):
        Likelihood.concatenate([values_of(share) for share in padded]).in_index_order()
    with pytest.raises(RunError, match="missing \\[1, 3, 5\\]"):
        values_of(strided(101, 2)[0]).in_index_order()


def test_an_error_of_a_process_is_raised_here():
    with pytest.raises(InputError, match="the word"):
        in_processes(_refuse, [("the word",), ("the word",)])
    with pytest.raises(RunError, match="ended without a result"):
        in_processes(_leave, [()])


def _refuse(word: str) -> None:
    raise InputError(word)


def _leave() -> None:
    os._exit(3)
