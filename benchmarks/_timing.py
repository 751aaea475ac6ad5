"""Fair timings on a machine that others use too: the contestants take turns, and ratios are formed within a round."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Timing:
    """Seconds per round of each contestant, in the order of the rounds."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Median seconds of one contestant."""
        return median(self.seconds[name])

    def ratios(self, name: str, peer: str) -> list[float]:
        """Seconds of `name` over seconds of `peer`, round by round, sorted."""
        return sorted(a / b for a, b in zip(self.seconds[name], self.seconds[peer], strict=True))

    def summary(self, name: str, peer: str) -> str:
        """One line: both medians, the median ratio and its range."""
        ratios = self.ratios(name, peer)
        return (
            f"{name} {self.median(name):.4f} s, {peer} {self.median(peer):.4f} s, "
            f"ratio {median(ratios):.3f} (range {ratios[0]:.3f} .. {ratios[-1]:.3f}, {len(ratios)} rounds)"
        )


def interleaved(
    contestants: dict[str, Callable[[], object]], rounds: int, warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:  # fmt: skip
    """Time each contestant once per round; the order turns from round to round, so that drift favours nobody.

    Arguments:
        contestants: name to a function of no arguments that does one unit of work.
        rounds: number of timed rounds.
        warm_up: untimed calls of each before the first round.
        clock: seconds; `time.process_time` counts what one thread used, whatever else the machine does.
    """
    for work in contestants.values():
        for _ in range(warm_up):
            work()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            began = clock()
            contestants[name]()
            seconds[name].append(clock() - began)
    return Timing(seconds)
