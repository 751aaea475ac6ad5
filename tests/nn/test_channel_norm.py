"""The norm over channels against a loop."""

from __future__ import annotations

import pytest
import torch

from genmodels.nn import ChannelNorm


def by_loop(norm, x):
    rows = x.movedim(1, -1).reshape(-1, x.shape[1])
    done = []
    for row in rows:
        mean = row.sum() / len(row)
        variance = (row - mean).square().sum() / len(row)
        done.append((row - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias)
    return torch.stack(done).reshape(len(x), *x.shape[2:], x.shape[1]).movedim(-1, 1)


@pytest.mark.parametrize("space", [(), (7,), (4, 5)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_equals_the_loop(space, channels_last):
    torch.manual_seed(0)
    norm, x = ChannelNorm(6).double(), torch.randn(3, 6, *space).double()
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    if channels_last and len(space) == 2:
        x = x.contiguous(memory_format=torch.channels_last)
    assert torch.allclose(norm(x), by_loop(norm, x), atol=1e-12)
    # Planted bug: moments over the positions of a channel.
    if space:
        wrong = torch.nn.functional.instance_norm(x, None, None, norm.weight, norm.bias)
        assert not torch.allclose(wrong, by_loop(norm, x), atol=1e-2)


def test_keeps_the_memory_format():
    x = torch.randn(2, 4, 5, 6).contiguous(memory_format=torch.channels_last)
    assert ChannelNorm(4)(x).is_contiguous(memory_format=torch.channels_last)
