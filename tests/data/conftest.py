"""Where the real data are, for the tests that use them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real data, or a skip."""
    folder = Path(os.environ.get("GENMODELS_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not (folder / "MNIST" / "raw").is_dir():
        pytest.skip(f"no MNIST in {folder} (set GENMODELS_SHARED_DATA to a folder that holds MNIST/raw)")
    return folder
