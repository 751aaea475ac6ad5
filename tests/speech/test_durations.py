"""Rounding of durations: the total is exact, every token has a frame, and no end is far from its place."""

from __future__ import annotations

import pytest
import torch

from genmodels.speech.alignment import integer_durations, path_of, total_frames

VECTORS = [
    ((1.4, 2.3, 0.4, 3.2), 8, (2, 2, 1, 3)),
    ((1.4, 2.3, 0.4, 3.2), 7, (1, 3, 1, 2)),
    ((0.1, 0.1, 0.1, 0.1), 4, (1, 1, 1, 1)),
    ((5, 0.01, 0.01, 0.01), 5, (2, 1, 1, 1)),
    ((1, 3, 2, 1, 1), 8, (1, 3, 2, 1, 1)),
    ((1, 3, 2, 1, 1), 16, (2, 6, 4, 2, 2)),
    ((1, 3, 2, 1, 1), 5, (1, 1, 1, 1, 1)),
    ((2.5, 2.5, 2.5, 2.5), 10, (3, 2, 3, 2)),
]


@pytest.mark.parametrize("widths, total, expected", VECTORS)
def test_vectors(widths, total, expected):
    assert integer_durations(torch.tensor([widths]), torch.tensor([total]))[0].tolist() == list(expected)


def laws(rounding) -> bool:
    """Whether totals are kept, no token is without a frame, and longer speech makes no token shorter in the sum."""
    generator = torch.Generator().manual_seed(0)
    widths = torch.rand(50, 12, generator=generator) * 4
    for total in (12, 13, 20, 57, 200):
        found = rounding(widths, torch.full((50,), total))
        if not (found.sum(1) == total).all() or found.min() < 1:
            return False
    return True


def test_totals_are_kept():
    assert laws(integer_durations)
    assert not laws(lambda widths, total: torch.ceil(total[:, None] * widths / widths.sum(1, keepdim=True)).long())


def test_ends_are_near_their_place():
    generator = torch.Generator().manual_seed(1)
    widths = 1.5 + torch.rand(50, 12, generator=generator)  # so long that nothing is clipped
    found = integer_durations(widths)
    place = widths.double().cumsum(1) * (found.sum(1) / widths.double().sum(1))[:, None]
    assert (found.cumsum(1) - place).abs().max() <= 0.5 + 1e-9


def test_speed_never_lengthens():
    widths = torch.rand(20, 9, generator=torch.Generator().manual_seed(2)) * 5
    totals = torch.stack([total_frames(widths / speed) for speed in (0.5, 1.0, 1.5, 3.0)])
    assert (totals.diff(dim=0) <= 0).all() and (totals >= 9).all()


def test_padding_has_no_frames():
    widths = torch.rand(3, 6, generator=torch.Generator().manual_seed(3)) * 4 + 0.1
    mask = torch.arange(6) < torch.tensor([6, 2, 4])[:, None]
    found = integer_durations(widths.masked_fill(~mask, torch.nan), mask=mask[:, None])
    for k, n in enumerate((6, 2, 4)):
        assert found[k, :n].tolist() == integer_durations(widths[k : k + 1, :n])[0].tolist()
        assert not found[k, n:].any()
    assert path_of(found, int(found.sum(1).max())).sum((1, 2)).equal(found.sum(1))


def test_too_few_frames_and_bad_widths():
    with pytest.raises(ValueError, match="it takes 3 frames at least"):
        integer_durations(torch.ones(1, 3), torch.tensor([2]))
    with pytest.raises(ValueError, match="finite and not negative"):
        integer_durations(torch.tensor([[1.0, -1.0]]))
