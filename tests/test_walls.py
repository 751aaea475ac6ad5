"""The walls of the house: the plain rooms are useful without Lightning and Hydra, and imports go one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

#: What a room may import besides the standard library and itself.
ALLOWED = {
    "nn": {"torch", "genmodels.random", "genmodels.errors"},
    "diffusion": {"torch", "scipy", "numpy", "genmodels.random", "genmodels.errors", "genmodels.nn"},
    "energy": {"torch", "scipy", "numpy", "genmodels.random", "genmodels.errors", "genmodels.nn"},
}
BLOCKED = ("pytorch_lightning", "lightning", "lightning_fabric", "hydra", "omegaconf", "wandb")


def imported(source: str) -> set[str]:
    """Modules that a source file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def trespassing(room: str, source: str) -> list[str]:
    """Imports of a file that its room may not have."""
    allowed = ALLOWED[room] | {f"genmodels.{room}"}
    return sorted(
        name for name in imported(source)
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(name == a or name.startswith(f"{a}.") for a in allowed)
    )  # fmt: skip


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_it_may(room):
    files = sorted((REPOSITORY / "genmodels" / room).rglob("*.py"))
    assert files
    assert {str(f): t for f in files if (t := trespassing(room, f.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize("line", ["import pytorch_lightning as pl", "from omegaconf import OmegaConf",
                                  "from genmodels.models.base import Loss", "def f():\n    import hydra"])  # fmt: skip
def test_law_catches_a_trespasser(line):
    assert trespassing("nn", f"import torch\n{line}\n")


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_works_where_lightning_and_hydra_are_missing(room):
    code = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED!r})); import genmodels.{room}; print('fine')"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, genmodels, genmodels.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert not set(done.stdout.split()) & {"torch", "numpy", "hydra", "omegaconf", "yaml", "pytorch_lightning"}
