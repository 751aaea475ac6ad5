"""The command `genmodels evaluate` in this process, the reports it writes, and the Gaussian it is tried on."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

from jsonschema import Draft202012Validator

from genmodels.cli.main import main
from genmodels.report import schema
from tests.gaussian_models import GaussianDiffusion, GaussianEnergy, GaussianFlow

MEAN, COVARIANCE = [0.5, -1.0, 2.0], [[1.0, 0.5, 0.0], [0.5, 2.0, -0.3], [0.0, -0.3, 0.5]]
FAMILIES = {"flow": (GaussianFlow, {}), "diffusion": (GaussianDiffusion, {"num_steps": 60, "variance": "beta"}),
            "energy": (GaussianEnergy, {})}
QUICK = ["chains=64", "densities=40", "stages=[likelihood]"]


def evaluate(*words: str, cwd: Path, code: int = 0) -> tuple[str, str]:
    """Standard output and error of a command run in this process."""
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(cwd)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            found = main(["evaluate", *words, "trust=[tests]"])
    finally:
        os.chdir(before)
    assert found == code, err.getvalue()
    return out.getvalue(), err.getvalue()


SCHEMA = Draft202012Validator(schema())


def report(path: Path) -> dict:
    """A report, which keeps to its schema, or a table."""
    found = json.loads(path.read_text())
    if path.name != "table.json":
        SCHEMA.validate(found)
    return found
