"""Who may attend to whom: vectors, intersections, errors."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn.attention import Reach, build_mask


def shown(mask):
    """1 = may attend, rows parted by strokes."""
    return "/".join("".join(str(int(cell)) for cell in row) for row in mask)


@pytest.mark.parametrize("options, Lq, Lk, q0, wanted", [
    ({"window": (1, 1)}, 4, 4, 0, "1100/1110/0111/0011"),
    ({"chunk": (2, 1)}, 5, 5, 0, "11000/11000/11110/11110/00111"),
    ({"causal": True}, 2, 4, 2, "1110/1111"),
    ({"chunk": (2, 0)}, 4, 4, 0, "1100/1100/0011/0011"),
    ({"chunk": (2, None)}, 5, 5, 0, "11000/11000/11110/11110/11111"),
    ({"chunk": (2, 1), "causal": True}, 5, 5, 0, "10000/11000/11100/11110/00111"),
    ({"window": (None, 0)}, 3, 3, 0, "100/110/111"),
    ({"window": (0, None)}, 3, 3, 0, "111/011/001"),
    ({}, 2, 3, 0, "111/111"),
])  # fmt: skip
def test_vectors(options, Lq, Lk, q0, wanted):
    mask = build_mask(Lq, Lk, q0, **options)
    assert mask.dtype == torch.bool and mask.shape == (1, 1, Lq, Lk)
    assert shown(mask[0, 0]) == wanted


def test_trigger():
    mask = build_mask(2, 5, trigger=(torch.tensor([[0, 2], [3, 9]]), 1))
    assert [shown(m) for m in mask[:, 0]] == ["11000/11110", "11111/11111"]
    assert shown(build_mask(2, 5, k0=1, trigger=(torch.tensor([[0, 2]]), 1))[0, 0]) == "10000/11100"


def test_padding_and_intersection():
    padding = torch.tensor([[True, True, False], [False, True, True]])[:, None]
    mask = build_mask(3, 3, causal=True, padding=padding)
    assert [shown(m) for m in mask[:, 0]] == ["100/110/110", "000/010/011"]
    together = build_mask(3, 3, causal=True, window=(1, 1), padding=padding, trigger=(torch.zeros(2, 3).long(), 1))
    apart = (build_mask(3, 3, causal=True) & build_mask(3, 3, window=(1, 1)) & padding[:, None]
             & build_mask(3, 3, trigger=(torch.zeros(2, 3).long(), 1)))  # fmt: skip
    assert torch.equal(together, apart)


def test_only_absolute_indices_matter():
    for reach in ({"causal": True}, {"window": (2, 1)}, {"chunk": (3, 1)}):
        whole = build_mask(9, 9, **reach)
        for q0, k0 in [(0, 4), (4, 0), (3, 2)]:
            assert torch.equal(build_mask(5, 4, q0, k0, **reach), whole[..., q0 : q0 + 5, k0 : k0 + 4])


@pytest.mark.parametrize("reach", [
    Reach(), Reach(causal=True), Reach(window=(2, 1)), Reach(window=(None, 3)), Reach(window=(2, None), causal=True),
    Reach(chunk=(3, 1)), Reach(chunk=(3, None)), Reach(chunk=(2, 2), window=(3, 1)),
])  # fmt: skip
def test_first_and_last_are_the_ends_of_the_reach(reach):
    i = torch.arange(30)
    allowed = reach.allowed(i[:, None], i)
    for query in range(10, 20):
        seen = allowed[query].nonzero().flatten().tolist()
        first, last = reach.first(query), reach.last(query)
        assert seen[0] == (0 if first is None else first) and seen[-1] == (29 if last is None else last)
    assert reach.everywhere == bool(allowed.all())
    assert reach.no_future == (not bool(allowed.triu(1).any()))
    assert reach.causal_alone == torch.equal(allowed, torch.ones(30, 30).tril().bool())


ONES = torch.ones(2, 1, 4, dtype=torch.bool)


@pytest.mark.parametrize("options, words", [
    ({"window": (-1, 0)}, "neither negative"),
    ({"window": (0, -2)}, "neither negative"),
    ({"window": 3}, "must be a pair"),
    ({"chunk": (0, 1)}, "size of at least 1"),
    ({"chunk": (2, -1)}, "negative number of chunks"),
    ({"trigger": (torch.zeros(1, 3).long(), -1)}, "negative delay"),
    ({"trigger": (torch.zeros(1, 2).long(), 0)}, r"\(B, 3\), got \(1, 2\)"),
    ({"padding": ONES.float()}, "must be boolean"),
    ({"padding": ONES.int()}, "must be boolean"),
    ({"padding": ONES[..., :3]}, r"\(2, 1, 3\) does not broadcast to \(B, 1, L\) = \(2, 1, 4\)"),
    ({"padding": ONES[0]}, r"\(1, 4\) does not broadcast"),
])  # fmt: skip
def test_what_makes_no_mask(options, words):
    with pytest.raises(ValueError, match=words):
        build_mask(3, 4, **options)
