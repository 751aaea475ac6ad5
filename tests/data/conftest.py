"""One thread: small tensors gain nothing from more."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
