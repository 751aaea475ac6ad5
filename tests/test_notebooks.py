"""The notebooks of the documentation run: with tiny settings in this process, as they stand with -m slow."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
NAMES = ("flows_in_the_plane", "diffusion_on_digits", "energy_based_models")
#: What a fast run puts in the place of the settings at the top of a notebook.
TINY = {"STEPS": 3, "SAMPLES": 10, "ITEMS": 8, "CHAIN": 3}


def cells(name: str) -> list[dict]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def tiny(source: str) -> str:
    """The source with small numbers in the line of the settings."""
    def smaller(match: re.Match) -> str:
        return f"{match[1]} = {', '.join(str(TINY[key.strip()]) for key in match[1].split(','))}"

    return re.sub(r"^([A-Z]+(?:, [A-Z]+)*) = [\d, ]+$", smaller, source, flags=re.MULTILINE)


def test_settings_become_small():
    assert tiny("a = 3\nSTEPS, ITEMS = 400, 64\n") == "a = 3\nSTEPS, ITEMS = 3, 8\n"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_with_tiny_settings(name, monkeypatch, tmp_path):
    from matplotlib import pyplot

    monkeypatch.chdir(tmp_path)
    code = ["".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code"
            and "slow" not in cell["metadata"].get("tags", [])]  # a whole run, as in tests/test_api.py
    assert sum(source != tiny(source) for source in code) == 1
    scope = {"__name__": "__main__"}
    for number, source in enumerate(code):
        exec(compile(tiny(source), f"{name}, cell {number}", "exec"), scope)
    assert pyplot.get_fignums()
    pyplot.close("all")


def test_notebooks_are_stored_without_outputs():
    assert {file.stem for file in FOLDER.glob("*.ipynb")} == set(NAMES)
    for name in NAMES:
        code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
        assert (FOLDER / f"{name}.ipynb").stat().st_size < 200_000


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_as_it_stands(name, tmp_path):
    nbformat, client = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
