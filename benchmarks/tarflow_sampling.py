"""Ways of sampling from a TarFlow: with and without a cache of keys and values, and by fixed-point iteration.

    python benchmarks/tarflow_sampling.py [ckpt] [--side 32] [--n 16] [--blocks 2] [--width 256] [--device cpu]

Without a checkpoint the flow has random weights, which says something of the cost of a step and nothing of the number
of sweeps that trained models take. Printed are median seconds, network evaluations, and the errors against the inverse
in float64: the largest of a sample's values, for the median sample, for 90 % of the samples and for the worst, and the
largest of a log-determinant (nats of an item).
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from _timing import interleaved

from genmodels.flows.bijection import Bijection
from genmodels.flows.tarflow import Decoding, MetaBlock, decoding, tarflow
from genmodels.models.normalizing_flows import SAMPLERS

WAYS = {"cached": Decoding(), "gauss_seidel": SAMPLERS["gauss_seidel"], "jacobi": SAMPLERS["jacobi"]}


def uncached(block: MetaBlock, z: torch.Tensor) -> torch.Tensor:
    """The inverse of a meta-block by one pass of the whole network over all that is known, for each token."""
    tokens, added = block._tokens(z), block._added(None, z[0, 0].numel())
    found, out = tokens[:, :0], block.start.expand(len(z), 1, -1)
    for i in range(tokens.shape[1]):
        if i:
            out = block.net(found, added=None if added is None else added[:, :i])[:, -1:]
        params = out.unflatten(2, (-1, block.channels)).movedim(2, 1)
        found = torch.cat([found, block.transform.inverse(tokens[:, i : i + 1], params)[0]], dim=1)
    return block._event(found, z)


def flow_of(arguments) -> Bijection:
    if arguments.ckpt:
        from genmodels.models.checkpoint import load_model

        return load_model(arguments.ckpt)[0].weights("ema").flow.bijection
    torch.manual_seed(0)
    flow = tarflow((3, arguments.side, arguments.side), blocks=arguments.blocks, width=arguments.width, depth=2)
    flow.initialize(torch.randn(32, 3, arguments.side, arguments.side))
    for block in flow.modules():
        if isinstance(block, MetaBlock):
            torch.nn.init.normal_(block.net.leave.weight, std=0.02)
    return flow


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ckpt", nargs="?", help="a trained TarFlow; random weights without one")
    options = {
        "side": (32, "of images of three channels, for random weights"), "n": (16, "samples of a batch"),
        "batches": (1, "batches, one after the other"),
        "blocks": (2, "meta-blocks, for random weights"), "width": (256, "of the tokens, for random weights"),
        "repeats": (3, "rounds, of which the median is printed"), "threads": (1, "of torch; CPU time is counted for 1"),
    }
    for name, (value, words) in options.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{words} ({value})")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    flow = flow_of(arguments).eval().to(arguments.device)
    blocks = [block for block in flow.modules() if isinstance(block, MetaBlock)]
    if not blocks:
        raise SystemExit(f"{arguments.ckpt} holds no TarFlow")
    if any(block.uses_cond for block in blocks):
        raise SystemExit(f"{arguments.ckpt} is conditioned on the class: give a TarFlow without classes")
    torch.manual_seed(0)
    z = torch.randn(arguments.batches * arguments.n, *blocks[0].event_shape).to(arguments.device)

    def awaited(way):
        found = way()
        if z.device.type == "cuda":
            torch.cuda.synchronize()
        return found

    def inverse(how: Decoding, of: Bijection = flow, dtype: torch.dtype = torch.float32):
        values, volumes, sweeps = [], [], 0
        with decoding(of, how) as stack:
            for x in z.to(dtype).split(arguments.n):
                volume = 0.0
                for block in reversed(stack):
                    x, logdet = block.inverse(x)
                    volume = volume + logdet
                    sweeps += block.sweeps
                values.append(x)
                volumes.append(volume)
        return torch.cat(values), torch.cat(volumes), sweeps

    def without():
        values = []
        for x in z.split(arguments.n):
            for block in reversed(blocks):
                x = uncached(block, x)
            values.append(x)
        return torch.cat(values), None, arguments.batches * len(blocks) * (tokens - 1)

    tokens = z[0, 0].numel()
    exact, exact_volume, _ = inverse(WAYS["cached"], copy.deepcopy(flow).double(), torch.float64)
    ways = {"no cache": without, **{name: lambda how=how: inverse(how) for name, how in WAYS.items()}}
    # On one thread its own time is counted, whatever else the machine does.
    clock = time.process_time if arguments.threads == 1 and arguments.device == "cpu" else time.perf_counter
    timed = {name: lambda way=way: awaited(way) for name, way in ways.items()}
    timing = interleaved(timed, arguments.repeats, warm_up=int(z.device.type == "cuda"), clock=clock)
    print(f"{len(z)} samples in batches of {arguments.n}, {len(blocks)} meta-blocks of {tokens} tokens of "
          f"{z.shape[1]} numbers")
    for name, way in ways.items():
        found, volume, sweeps = way()
        nats = "" if volume is None else f", log-determinant {float((volume - exact_volume).abs().max()):.1e} nats"
        errors = (found - exact).abs().flatten(1).amax(1)
        median, most = errors.quantile(errors.new_tensor([0.5, 0.9])).tolist()
        print(f"  {name:16} {timing.median(name):8.3f} s  {sweeps:6} evaluations  "
              f"errors {median:.1e}, {most:.1e}, {float(errors.max()):.1e}{nats}")


if __name__ == "__main__":
    main()
