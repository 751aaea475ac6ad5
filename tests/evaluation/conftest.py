"""Checkpoints to evaluate, made once for a module."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from genmodels.core.data import DataSpec
from genmodels.models.build import build
from genmodels.models.normalizing_flows import RealNVP
from tests.evaluation.command import COVARIANCE, FAMILIES, MEAN
from tests.gaussian_models import log_prob, moments, save


@pytest.fixture(scope="module")
def gaussians(tmp_path_factory) -> Path:
    """One Gaussian as three checkpoints, and 200 test items drawn from it."""
    folder = tmp_path_factory.mktemp("gaussians")
    x = np.random.default_rng(0).multivariate_normal(MEAN, COVARIANCE, size=1000)
    np.savez(folder / "gauss.npz", x=x.astype("float32"))
    data = {"_target_": "genmodels.data.arrays.Arrays", "file": str(folder / "gauss.npz"), "test_fraction": 0.2,
            "seed": 0}  # fmt: skip
    spec = build(data).prepare().spec
    for name, (kind, options) in FAMILIES.items():
        save(kind(spec, mean=MEAN, covariance=COVARIANCE, **options), folder / name / "best.ckpt", data)
    return folder


@pytest.fixture(scope="module")
def truth(gaussians) -> float:
    data = {"_target_": "genmodels.data.arrays.Arrays", "file": str(gaussians / "gauss.npz"), "test_fraction": 0.2}
    x = next(iter(build(data).prepare().loader("test", 1000))).x
    return -float(log_prob(x, *moments(MEAN, COVARIANCE)).mean())


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """An untrained flow of digits conditioned on classes."""
    folder = tmp_path_factory.mktemp("digits")
    data = {"_target_": "genmodels.data.vision.Digits"}
    spec = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
    model = RealNVP(spec, layout=["checkerboard*2"], hidden=4, depth=1, class_conditional=True, ema_decay=0)
    model.initialize(next(iter(build(data).prepare().loader("train", 64))))
    save(model, folder / "best.ckpt", data)
    return folder
