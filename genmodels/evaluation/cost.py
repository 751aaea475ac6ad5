"""The cost of a sample: network evaluations, samples per second, latency, memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from genmodels.core.errors import counted
from genmodels.models.density import is_diffusion, is_flow, is_masked_diffusion

_WARM_UPS, _REPEATS, _FEWEST = 2, 20, 3


class EvaluationCounter:
    """Counts the rows that pass through each of several networks; guidance, which evaluates one twice, counts twice.

    Example:
        >>> layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> with EvaluationCounter(layer, other) as counter:
        ...     _ = layer(torch.zeros(3, 2)), layer(torch.zeros(5, 2)), other(torch.zeros(5, 2))
        >>> counter.rows
        8
    """

    def __init__(self, *networks: nn.Module):
        self.networks, self.counts = networks, [0] * len(networks)

    def __enter__(self) -> EvaluationCounter:
        def counting(number: int) -> Callable:
            def count(_module, given, named, _output) -> None:
                first = next(v for v in (*given, *named.values()) if isinstance(v, torch.Tensor))
                self.counts[number] += len(first)

            return count

        self._handles = [network.register_forward_hook(counting(number), with_kwargs=True)
                         for number, network in enumerate(self.networks)]
        return self

    def __exit__(self, *_error) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def rows(self) -> int:
        """The largest of the counts."""
        return max(self.counts, default=0)


def rows_of(counter: EvaluationCounter, made: dict) -> int:
    """The rows that a sampler evaluated: those counted, or what Markov chains report, which run a copy of the network.

    Example:
        >>> rows_of(EvaluationCounter(), {"acceptance": 0.9, "evaluations": 640})
        640
    """
    return made["evaluations"] if "acceptance" in made else counter.rows


def networks_of(core: nn.Module) -> list[nn.Module]:
    """The networks that a sampler evaluates: the core's own, or one in each layer of a flow."""
    for name in ("net", "network"):
        found = getattr(core, name, None)
        if isinstance(found, nn.Module):
            return [found]
    layers = [layer for layer in core.modules() if hasattr(layer, "inverse_cost")]
    return [layer.net for layer in layers if isinstance(getattr(layer, "net", None), nn.Module)]


def evaluations_per_sample(model, made: dict, rows: float, n: int) -> float | None:
    """Network evaluations per sample: counted, or as the sampler reports; for a flow the evaluations of one layer.

    A coupling layer needs one, an autoregressive layer one for each of its D dimensions. For transformer flows it is
    the mean over the meta-blocks, of which the sampler reports the sum.
    """
    reported = made.get("evaluations")
    if is_flow(model):
        blocks = sum(hasattr(layer, "sweeps") for layer in model.core.modules())
        if blocks and reported:
            return reported / blocks
        dims = [net.in_channels for net in networks_of(model.core) if hasattr(net, "unroll")]
        return max(1.0, rows / n if rows else max(dims, default=1))  # which the inverse never calls whole
    if rows:
        return rows / n
    if reported is None or is_diffusion(model) or is_masked_diffusion(model):
        return reported  # diffusion models report the evaluations of one sample, Markov chains those of all
    return reported / n


def measure(model, draw: Callable, *, batch_size: int = 64, budget: float = 60.0, weights: str | float = "ema") -> dict:
    """Samples per second in batches, and the latency of a single one.

    Two warm-ups are discarded, the device is synchronised, decoding to the data's units is included, writing is not.

    Arguments:
        model: the model.
        draw: `draw(n, start)` returns n samples.
        batch_size: of the batches.
        budget: approximate seconds for everything; of slow samples fewer than 20 are timed, at least 3.
        weights: those that `draw` samples with, `ema`, `raw`, or one of the decays.
    """
    begin = time.perf_counter()
    own_peak = _reset_peak(model.device)
    first = _timed(model, draw, batch_size)  # the first warm-up
    with EvaluationCounter(*networks_of(model.weights(weights))) as counter:
        samples = draw(batch_size, 0)  # the second one
    evaluations = evaluations_per_sample(model, samples.made, rows_of(counter, samples.made), batch_size)
    repeats = max(1, min(5, int(budget / 4 / max(first, 1e-6))))
    batches = [_timed(model, draw, batch_size) for _ in range(repeats)]
    peak = _peak(model.device)
    one = [_timed(model, draw, 1) for _ in range(_WARM_UPS)][-1]
    left = max(0.0, budget - (time.perf_counter() - begin))
    singles = [_timed(model, draw, 1) for _ in range(max(_FEWEST, min(_REPEATS, int(left / max(one, 1e-6)))))]
    context = context_of(model) + ("" if own_peak else ", peak memory since the process began")
    quantiles = torch.tensor(singles, dtype=torch.float64).quantile(torch.tensor([0.5, 0.95], dtype=torch.float64))
    return {
        "sampler": samples.made.get("sampler"), "steps": samples.made.get("steps"), "evaluations": evaluations,
        "samples_per_second": batch_size / min(batches), "batch_size": batch_size,
        "latency": {"p50": float(quantiles[0]), "p95": float(quantiles[1]), "n": len(singles)},
        "peak_memory": peak, "seconds": time.perf_counter() - begin, "context": context,
    }


def context_of(model) -> str:
    """Device, threads, precision and version of torch of the measurement."""
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device)
    kept = next((t for t in model.core.state_dict().values() if t.is_floating_point()), torch.zeros(()))
    precision = str(kept.dtype).removeprefix("torch.")
    threads = torch.get_num_threads()
    return f"{device}, {counted(threads, 'thread')}, {precision}, not compiled, torch {torch.__version__}"


def _timed(model, draw: Callable, n: int) -> float:
    _wait(model.device)
    begin = time.perf_counter()
    draw(n, 0)
    _wait(model.device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> bool:
    """Reset the peak of memory; False if the system cannot, which is then reported."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux only, and not in all containers
    except OSError:
        return False
    return True


def _peak(device: torch.device) -> int | None:
    """Peak memory in bytes: of the accelerator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():
        line = next((text for text in status.read_text().splitlines() if text.startswith("VmHWM")), None)
        if line is not None:
            return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
