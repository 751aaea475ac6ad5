"""docs/glance.png: the first table of docs/results.md as a picture, samples against bounds, one arrow for each model.

    python benchmarks/glance.py

An arrow goes from the shorter training to the longer one; a model with one training alone is a dot. Thin lines are
standard errors of the distances; those of the bounds are too small to see.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
FAMILIES = {"flows": "C0", "diffusion and scores": "C1", "energies": "C2"}
PLACES = {"masked_diffusion": (-30, 7), "score": (-4, 6), "ddpm, for likelihood": (2, -12),
          "flow_matching, for likelihood": (6, -3), "nsf": (-20, 5),
          ("MNIST", "Flow++"): (-38, -10),
          ("Fashion-MNIST", "flow_matching, for likelihood"): (-40, -12)}  # of labels that would cross
FLOWS = ("tarflow", "realnvp", "jet", "nsf", "glow", "maf")


def table(text: str) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table under "At a glance"."""
    lines = [line for line in text.split("## At a glance", 1)[1].split("\n## ", 1)[0].splitlines() if line[:1] == "|"]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return header, rows


def number(cell: str) -> float | None:
    """The value of `<= 1.0904(27)`; None of an empty cell."""
    found = re.search(r"\d[\d.]*", cell)
    return None if found is None else float(found[0])


def error(cell: str) -> float:
    """The error of `<= 1.0904(27)`, 0.0027."""
    value, digits = re.search(r"(\d[\d.]*)\((\d+)\)", cell).groups()
    return int(digits) / 10 ** len(value.partition(".")[2])


def family(name: str) -> str:
    word = re.search(r"`(\w+)`", name)[1]
    return "flows" if word in FLOWS else "energies" if word.startswith("energy") else "diffusion and scores"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    header, rows = table((DOCS / "results.md").read_text(encoding="utf-8"))
    figure = Figure(figsize=(13, 6), layout="constrained")
    for axis, data in zip(figure.subplots(1, 2), ("MNIST", "Fashion-MNIST"), strict=True):
        columns = [k for k, name in enumerate(header) if name.split(",")[0] == data]
        for row in rows:
            points = [(number(row[k]), number(row[k + 1])) for k in columns]
            points = [point for point in points if None not in point]
            if not points:
                continue
            color = FAMILIES[family(row[0])]
            if len(points) > 1:
                axis.annotate("", points[-1], points[0], arrowprops={"arrowstyle": "->", "color": color, "shrinkB": 0})
            axis.plot(*points[0], "o", color=color, markersize=4)
            errors = [error(row[k + 1]) for k in columns if row[k] and row[k + 1]]
            axis.errorbar(*zip(*points, strict=True), errors, fmt="none", ecolor=color, elinewidth=0.8, alpha=0.4)
            axis.update_datalim(points)
            label = re.sub(r"\]\([^)]*\)|[`\[*]", "", row[0]).replace("glow with couplings of ", "")
            place = PLACES.get((data, label), PLACES.get(label, (6, 2)))
            axis.annotate(label, points[0], place, textcoords="offset points", fontsize=8, color=color)
        held_out = next(number(row[columns[0] + 1]) for row in rows if row[0] == "other held-out items")
        axis.axhline(held_out, color="0.6", linewidth=0.8, linestyle="--", label="other held-out items")
        for name, color in FAMILIES.items():
            axis.plot([], [], "o", color=color, label=name)
        axis.set(title=data, xlabel="test bound, bits/dim", ylabel="Fréchet distance of 1,000 samples", yscale="log")
        axis.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
        axis.set_yticks([], minor=True)
        axis.margins(x=0.12)
        axis.autoscale_view()
        axis.legend(fontsize=8)
    figure.savefig(DOCS / "glance.png", dpi=100)


if __name__ == "__main__":
    main()
