"""What the tests of networks of noisy data share: their inputs, and what half precision may change."""

from __future__ import annotations

import pytest
import torch


def inputs(event_shape, batch=2, num_classes=None, dtype=torch.float64):
    """Noisy data (B, *event), log-SNRs (B,), and labels (B,) or None."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch, *event_shape, generator=generator, dtype=dtype)
    labels = None if num_classes is None else torch.arange(batch) % num_classes
    return x, torch.linspace(-6, 5, batch, dtype=dtype), labels


def check_bf16_loss(net, event_shape) -> None:
    """The mean squared error under autocast is within one per cent, of float32 outputs."""
    x, log_snr, _ = inputs(event_shape, batch=16, dtype=torch.float32)
    target = torch.randn(x.shape, generator=torch.Generator().manual_seed(4))
    losses = []
    for reduced in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=reduced):
            try:
                y = net.float()(x, log_snr)
            except RuntimeError as error:
                if "only supported when avx512" not in str(error):
                    raise
                pytest.skip("torch's attention in bfloat16 fails on processors with AMX under a lower capability")
        assert y.dtype == torch.float32
        losses.append(float((y - target).square().mean()))
    assert losses[0] != losses[1] and abs(losses[1] / losses[0] - 1) < 0.01
