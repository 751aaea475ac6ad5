"""Start-up time of `--help` and of the answer to a misspelt key, compared with Python itself and importing Hydra.

    python benchmarks/startup.py [--repeats 7]

Prints the median wall-clock seconds of each. The last two rows are the floor on this machine at this moment: an answer
to a misspelt key needs Hydra, and on a loaded machine both grow together.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = str(Path(__file__).resolve().parents[1] / "train.py")
ROWS = {
    "train.py --help": [SCRIPT, "--help"],
    "train.py model.net.chanels=64": [SCRIPT, "model.net.chanels=64"],
    "train.py model=dppm": [SCRIPT, "model=dppm"],
    "train.py --cfg job": [SCRIPT, "--cfg", "job"],
    'python -c "import hydra"': ["-c", "import hydra"],
    "python -c pass": ["-c", "pass"],
}


def seconds(words: list[str]) -> float:
    """Wall-clock time of one process, which has to end as expected: a misspelt setting with a usage error."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    taken = time.perf_counter() - start
    if done.returncode != (2 if {"model.net.chanels=64", "model=dppm"} & set(words) else 0):
        raise SystemExit(f"{' '.join(words)} ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    return taken


def main() -> None:
    """Time every row once without counting (file caches), then all rows in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    for words in ROWS.values():
        seconds(words)
    times = {name: [] for name in ROWS}
    for _ in range(repeats):
        for name, words in ROWS.items():
            times[name].append(seconds(words))
    for name, values in times.items():
        print(f"{name:<32} {statistics.median(values):.3f} s   ({min(values):.3f} .. {max(values):.3f})")


if __name__ == "__main__":
    main()
