"""Time and peak memory of every attention by sequence length, compared with torch's own and x-transformers.

    python benchmarks/attention.py [--threads 2] [--repeats 5] [--lengths 256 512 1024 2048 4096 8192] [--backward]
                                   [--only "Transformer-XL" ...] [--device cuda] [--out cost.csv] [--figure cost.png]

Everything is a whole module of the same width and heads: projections, attention, output; batch 1, no masks. The unit is
`torch`, torch's fused attention between the same projections. All that fit take turns, and the ratio to the unit is
formed within each round. The peak is the most bytes alive at once during a call, beyond those alive before it, counted
from the allocator's own events. A contestant is left out of a length when it is said to need more than `--limit` GiB
there, or took more than `--patience` seconds at the length before. Maps are 32 wide. Nothing is asserted; the last
lines are the ratios that the page on attention speaks of. `--out` is written after each length, and keeps what the file
holds of other lengths and contestants, so that a long table can be made in pieces; `--lengths` without a number only
reads it, for the ratios and the figure. Peer: `pip install x-transformers`; absent, it is left out.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from _timing import Timing, interleaved
from memory import peak_bytes
from torch import Tensor, nn

from genmodels.nn.attention import (
    LSH,
    ALiBi,
    Attention,
    HardAttention,
    LocalDenseSynthesizer,
    LocalMonotonic,
    Location,
    MelPosition,
    MusicTransformer,
    Nystrom,
    Rotary,
    Rotary2d,
    ScaledDot,
    ScoredAttention,
    Shaw,
    Swin2d,
    T5Bias,
    TransformerXL,
    relative_positions,
)

UNIT = "torch"
WIDTH_OF_MAPS = 32


class Plain(nn.Module):
    """Torch's fused attention between four projections."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.project_in, self.project_out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project_in(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.project_out(y.transpose(1, 2).flatten(2))


class NaiveShaw(Shaw):
    """Relative keys by a tensor of one vector for each pair, (L, L, d)."""

    def score_bias(self, q, q0, k0, Lq, Lk, space=None):
        rows = relative_positions(Lq, Lk, q0, k0, device=q.device).clamp(-self.K, self.K) + self.K
        return torch.einsum("bhid,hijd->bhij", q / math.sqrt(self.head_dim), self.keys[:, rows])


@dataclass(frozen=True)
class Contestant:
    """What is measured.

    Arguments:
        make: `make(dim, heads, length) -> module`.
        bytes: `bytes(length, dim, heads)`, memory besides q, k and v, if the module has no `explain`.
        map: whether it takes the height and width of a map.
    """

    make: Callable[[int, int, int], nn.Module]
    bytes: Callable[[int, int, int], int] | None = None
    map: bool = False


def core(position: Callable[[int, int], nn.Module] | None = None, **options) -> Contestant:
    """Our core with a position."""
    return Contestant(lambda dim, heads, length: Attention(dim, heads, position and position(dim, heads), **options))


def of_maps(position: Callable[[int, int, int], nn.Module]) -> Contestant:
    """Our core with a position of maps, made for the height that the length is."""
    return Contestant(
        lambda dim, heads, length: Attention(dim, heads, position(dim, heads, length // WIDTH_OF_MAPS)), map=True
    )


def mechanism(make: Callable[[int, int], nn.Module]) -> Contestant:
    """A mechanism that is no position scheme of `Attention`."""
    return Contestant(lambda dim, heads, length: make(dim, heads))


def naive_shaw(dim: int, heads: int, length: int) -> nn.Module:
    return Attention(dim, heads, NaiveShaw(dim, heads, K=length, values=False))


def x_transformers(dim: int, heads: int, length: int) -> nn.Module:
    from x_transformers.x_transformers import Attention as Peer

    return Peer(dim=dim, heads=heads, dim_head=dim // heads, flash=True)


CONTESTANTS: dict[str, Contestant] = {
    UNIT: Contestant(lambda dim, heads, length: Plain(dim, heads), lambda length, dim, heads: 0),
    "x-transformers": Contestant(x_transformers, lambda length, dim, heads: 0),
    "content": core(),
    "Transformer-XL": core(TransformerXL),
    "Transformer-XL, explicit": core(TransformerXL, backend="explicit"),
    "Shaw, keys": core(lambda dim, heads: Shaw(dim, heads, K=64, values=False)),
    "Shaw, naive keys": Contestant(
        naive_shaw, lambda length, dim, heads: 4 * length**2 * (dim + 2 * heads)
    ),
    "Shaw, keys and values": core(lambda dim, heads: Shaw(dim, heads, K=64)),
    "Music Transformer": core(lambda dim, heads: MusicTransformer(dim, heads, max_len=512)),
    "T5": core(T5Bias),
    "ALiBi": core(ALiBi),
    "RoPE": core(Rotary),
    "window of 129": core(window=(64, 64)),
    "Transformer-XL, chunks": core(TransformerXL, chunk=(64, 1)),
    "Swin": of_maps(lambda dim, heads, height: Swin2d(dim, heads, size=(height, WIDTH_OF_MAPS))),
    "axial RoPE": of_maps(lambda dim, heads, height: Rotary2d(dim, heads)),
    "mel, RoPE": of_maps(lambda dim, heads, height: MelPosition(dim, heads, n_freq=height, time=Rotary(dim, heads))),
    "scaled dot": mechanism(lambda dim, heads: ScoredAttention(dim, heads, ScaledDot(dim, heads))),
    "additive": mechanism(ScoredAttention),
    "location": mechanism(lambda dim, heads: ScoredAttention(dim, heads, Location(dim, heads))),
    "hard": mechanism(lambda dim, heads: HardAttention(dim, heads, ScaledDot(dim, heads))),
    "local monotonic": mechanism(LocalMonotonic),
    "local dense": mechanism(lambda dim, heads: LocalDenseSynthesizer(dim, heads, c=15)),
    "Nystrom": mechanism(lambda dim, heads: Nystrom(dim, heads, landmarks=32)),
    "LSH": Contestant(lambda dim, heads, length: LSH(dim, heads, buckets=max(length // 64, 2), chunk=64, rounds=2)),
}


@dataclass(frozen=True)
class Cost:
    """What one contestant took at one length."""

    name: str
    length: int
    seconds: float
    ratio: float
    peak: int


def work_of(module: nn.Module, x: Tensor, backward: bool, given: dict) -> Callable[[], None]:
    """A function of no arguments: one call, with its backward pass if that is asked for."""

    def forward() -> Tensor:
        result = module(x, **given)
        return result[0] if isinstance(result, tuple) else result

    def both() -> None:
        module.zero_grad(set_to_none=True)
        forward().sum().backward()
        synchronise(x)

    @torch.no_grad()
    def alone() -> None:
        forward()
        synchronise(x)

    return both if backward else alone


def synchronise(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def peak(work: Callable[[], None], x: Tensor) -> int:
    """The most bytes alive at once during `work`, beyond those alive before."""
    if not x.is_cuda:
        return peak_bytes(work)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


def measure(length: int, names: list[str], options: argparse.Namespace) -> list[Cost]:
    """The costs of those contestants that fit; the others are named."""
    x, works = torch.randn(1, length, options.dim, device=options.device), {}
    for name in names:
        contestant = CONTESTANTS[name]
        torch.manual_seed(0)
        module = contestant.make(options.dim, options.heads, length).to(options.device).eval()
        needed = (
            contestant.bytes(length, options.dim, options.heads) if contestant.bytes is not None
            else module.explain(length, length, options.device).extra_bytes
        )  # fmt: skip
        if needed * (3 if options.backward else 1) > options.limit * 2**30:
            print(f"  {name}: left out, needs about {needed / 2**30:.1f} GiB besides q, k, v")
            continue
        given = {"space": (length // WIDTH_OF_MAPS, WIDTH_OF_MAPS)} if contestant.map else {}
        works[name] = work_of(module, x, options.backward, given)
    timing: Timing = interleaved(works, options.repeats, warm_up=1)
    return [
        Cost(name, length, timing.median(name), median(timing.ratios(name, UNIT)), peak(work, x))
        for name, work in works.items()
    ]


def read(path: str) -> list[Cost]:
    """What an earlier run has written, if there is any."""
    if not Path(path).exists():
        return []
    with open(path, newline="") as file:
        return [
            Cost(row["name"], int(row["length"]), float(row["seconds"]), float(row["ratio"]), int(row["peak_bytes"]))
            for row in csv.DictReader(file)
        ]


def write(costs: list[Cost], path: str) -> None:
    """All that is known, as a table."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "length", "seconds", "ratio", "peak_bytes"])
        writer.writerows([c.name, c.length, c.seconds, c.ratio, c.peak] for c in costs)


def joined(old: list[Cost], new: list[Cost]) -> list[Cost]:
    """Old costs and new ones in the order of contestants and lengths; what was measured again is replaced."""
    known = {(cost.name, cost.length): cost for cost in [*old, *new]}
    order = list(CONTESTANTS)
    return sorted(known.values(), key=lambda cost: (order.index(cost.name), cost.length))


def growth(costs: list[Cost], name: str) -> str:
    """time(2L) / time(L) for each doubling."""
    seconds = {cost.length: cost.seconds for cost in costs if cost.name == name}
    doubled = [(length, seconds[2 * length] / seconds[length]) for length in seconds if 2 * length in seconds]
    return ", ".join(f"{length} to {2 * length}: {ratio:.2f}" for length, ratio in doubled)


def crossing(costs: list[Cost], name: str) -> str:
    """The first length from which on it is faster than the unit."""
    slower = [cost.length for cost in costs if cost.name == name and cost.ratio >= 1]
    faster = [c.length for c in costs if c.name == name and c.length > max(slower, default=0)]
    return f"faster than torch's own from {min(faster)} on" if faster else "never faster than torch's own here"


def ratios(costs: list[Cost], name: str, other: str) -> str:
    """Time and peak of one over another, length by length."""
    by = {(cost.name, cost.length): cost for cost in costs}
    lengths = sorted({cost.length for cost in costs})
    both = [(by[name, n], by[other, n]) for n in lengths if (name, n) in by and (other, n) in by]
    parts = [(a.length, a.seconds / b.seconds, a.peak / max(b.peak, 1)) for a, b in both]
    return ", ".join(f"{length}: time {seconds:.2f}, peak {peak:.2f}" for length, seconds, peak in parts)


def draw(costs: list[Cost], path: str) -> None:
    """Time and peak memory against length, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(15, 7))
    lengths = sorted({cost.length for cost in costs})
    for number, name in enumerate(dict.fromkeys(cost.name for cost in costs)):
        own = [cost for cost in costs if cost.name == name]
        style = {"label": name, "color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3]}
        axes[0].loglog([c.length for c in own], [c.seconds for c in own], **style)
        axes[1].loglog([c.length for c in own], [c.peak / 2**20 for c in own], **style)
    for axis, title in zip(axes, ("seconds", "peak memory, MiB"), strict=True):
        axis.set(xlabel="length", title=title)
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=float, default=4.0, help="GiB")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--out")
    parser.add_argument("--figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = list(dict.fromkeys([UNIT, *options.only]))
    if importlib.util.find_spec("x_transformers") is None and "x-transformers" in names:
        print("x-transformers is not installed: left out")
        names.remove("x-transformers")
    costs = read(options.out) if options.out else []
    for length in sorted(options.lengths):
        print(f"length {length}, width {options.dim}, {options.heads} heads, "
              f"{'forward and backward' if options.backward else 'forward'}")  # fmt: skip
        found = measure(length, names, options)
        for cost in found:
            print(f"  {cost.name:26s} {1e3 * cost.seconds:10.2f} ms  x{cost.ratio:7.2f}  "
                  f"peak {cost.peak / 2**20:9.2f} MiB", flush=True)  # fmt: skip
        costs = joined(costs, found)
        if options.out:
            write(costs, options.out)
        late = [cost.name for cost in found if cost.seconds > options.patience]
        names = [name for name in names if name not in late]
        if late:
            print(f"  left out from here on, for time: {', '.join(late)}")
    print("growth, time(2L) / time(L)")
    for name in ("local dense", "Nystrom", "LSH", "window of 129", UNIT):
        if any(cost.name == name for cost in costs):
            print(f"  {name}: {growth(costs, name)}; {crossing(costs, name)}" if name != UNIT else
                  f"  {name}: {growth(costs, name)}")  # fmt: skip
    print(f"fused over explicit, Transformer-XL: {ratios(costs, 'Transformer-XL', 'Transformer-XL, explicit')}")
    print(f"naive over gathered keys, Shaw: {ratios(costs, 'Shaw, naive keys', 'Shaw, keys')}")
    print(f"naive keys over the shift, Transformer-XL: {ratios(costs, 'Shaw, naive keys', 'Transformer-XL')}")
    if options.figure:
        draw(costs, options.figure)


if __name__ == "__main__":
    main()
