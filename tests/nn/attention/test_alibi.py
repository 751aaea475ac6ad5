"""ALiBi: slopes, and the two forms under causality."""

from __future__ import annotations

import torch

from genmodels.nn.attention import ALiBi, Attention


def slopes(heads):
    return (-ALiBi(heads, heads).table(torch.tensor([-1])))[:, 0].tolist()


def test_slopes():
    assert slopes(8) == [2.0**-h for h in range(1, 9)]
    assert slopes(6) == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    assert slopes(1) == [2.0**-8]
    assert slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]
    assert len(set(slopes(13))) == 13


def test_precision_of_the_module_does_not_round_the_slopes():
    there_and_back = ALiBi(16, 16).half().double()
    assert torch.equal(there_and_back.table(torch.tensor([-1])), ALiBi(16, 16).table(torch.tensor([-1])))


def test_both_forms_agree_when_causal():
    torch.manual_seed(0)
    both = Attention(8, 2, ALiBi(8, 2), causal=True)
    past = Attention(8, 2, ALiBi(8, 2, symmetric=False), causal=True)
    past.load_state_dict(both.state_dict())
    x = torch.randn(1, 6, 8)
    assert torch.equal(both(x)[0], past(x)[0])
    assert ALiBi(8, 2, symmetric=False).table(torch.tensor([3]))[0] == 0


def test_nothing_is_stored():
    assert list(ALiBi(8, 2).state_dict()) == []
