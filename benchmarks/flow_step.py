"""Training and sampling steps of our flows compared with nflows, zuko, normflows and the bare coupling networks.

    python benchmarks/flow_step.py [--threads 2] [--repeats 9] [--cases vector glow maf] [--compile]

The unit is the cost of the coupling networks alone, on inputs of the same shapes: forward, backward, Adam's step.
Every library gets the same couplings, widths and batch; with `--compile` a further contestant is our flow, compiled,
with fused Adam. The contestants take turns and ratios are formed within each round. Nothing is asserted. Peers:
`pip install nflows normflows zuko`; one that is absent is left out.
"""

from __future__ import annotations

import argparse
import importlib.util

import torch
from _timing import Timing, interleaved
from torch import nn

from genmodels.flows.bases import StandardNormal
from genmodels.flows.coupling import Coupling
from genmodels.flows.coupling_flows import realnvp_vector
from genmodels.flows.flow import Flow
from genmodels.flows.multiscale import glow
from genmodels.flows.spline import neural_spline

FEATURES, COUPLINGS, HIDDEN, BATCH = 64, 8, 256, 512
MAF_FEATURES, MAF_LAYERS, MAF_BATCH = 128, 5, 64
GLOW = {"levels": 3, "steps": 8, "hidden": 64}
SHAPE, GLOW_BATCH = (1, 32, 32), 32


def perceptron(wide: int = FEATURES, features: int = FEATURES // 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN), nn.SiLU(),
                         nn.Linear(HIDDEN, wide))


class Ours(nn.Module):
    """Our flow, with the two faces that the benchmark asks of every library."""

    def __init__(self, bijection, event_shape):
        super().__init__()
        self.flow = Flow(bijection, StandardNormal(bijection.out_shape(event_shape)))
        self.generator = torch.Generator().manual_seed(0)

    def loss(self, x):
        return -self.flow.log_prob(x).mean()

    def draw(self, n):
        return self.flow.sample(n, generator=self.generator)


class Bare(nn.Module):
    """Networks alone, each on an input of the shape that it meets in the flow."""

    def __init__(self, networks, inputs):
        super().__init__()
        self.networks, self.inputs = nn.ModuleList(networks), inputs

    def loss(self, x):
        return sum(net(part).square().mean() for net, part in zip(self.networks, self.inputs, strict=True))

    def draw(self, n):
        return [net(part) for net, part in zip(self.networks, self.inputs, strict=True)]


class Nflows(nn.Module):
    def __init__(self):
        from nflows.distributions.normal import StandardNormal as Base
        from nflows.flows.base import Flow as Whole
        from nflows.transforms.base import CompositeTransform
        from nflows.transforms.coupling import AffineCouplingTransform

        class Net(nn.Module):
            def __init__(self, wide):
                super().__init__()
                self.net = perceptron(wide)

            def forward(self, x, context=None):
                return self.net(x)

        super().__init__()
        masks = [(torch.arange(FEATURES) < FEATURES // 2).int() * sign for sign in (1, -1)]
        layers = [AffineCouplingTransform(masks[k % 2] * 2 - 1 if k % 2 == 0 else masks[1] * 2 + 1,
                                          lambda _in, out: Net(out)) for k in range(COUPLINGS)]
        self.flow = Whole(CompositeTransform(layers), Base([FEATURES]))

    def loss(self, x):
        return -self.flow.log_prob(x).mean()

    def draw(self, n):
        return self.flow.sample(n)


class Zuko(nn.Module):
    def __init__(self):
        import zuko

        super().__init__()
        self.flow = zuko.flows.RealNVP(FEATURES, transforms=COUPLINGS, hidden_features=(HIDDEN, HIDDEN),
                                       activation=nn.SiLU, randmask=False)

    def loss(self, x):
        return -self.flow().log_prob(x).mean()

    def draw(self, n):
        return self.flow().sample((n,))


class Normflows(nn.Module):
    def __init__(self):
        import normflows as nf

        super().__init__()
        layers = [layer for _ in range(COUPLINGS) for layer in (
            nf.flows.AffineCouplingBlock(perceptron(), scale_map="exp"), nf.flows.Permute(FEATURES, mode="swap"))]
        self.flow = nf.NormalizingFlow(nf.distributions.DiagGaussian(FEATURES, trainable=False), layers)

    def loss(self, x):
        return self.flow.forward_kld(x)

    def draw(self, n):
        return self.flow.sample(n)[0]


class NflowsMAF(Nflows):
    def __init__(self):
        from nflows.distributions.normal import StandardNormal as Base
        from nflows.flows.base import Flow as Whole
        from nflows.transforms.autoregressive import MaskedAffineAutoregressiveTransform as Layer
        from nflows.transforms.base import CompositeTransform
        from nflows.transforms.permutations import ReversePermutation

        nn.Module.__init__(self)
        layers = [layer for _ in range(MAF_LAYERS) for layer in (
            Layer(MAF_FEATURES, HIDDEN, num_blocks=1, use_residual_blocks=False, activation=nn.functional.silu),
            ReversePermutation(MAF_FEATURES))]
        self.flow = Whole(CompositeTransform(layers), Base([MAF_FEATURES]))


class ZukoMAF(Zuko):
    def __init__(self):
        import zuko

        nn.Module.__init__(self)
        self.flow = zuko.flows.MAF(MAF_FEATURES, transforms=MAF_LAYERS, hidden_features=(HIDDEN, HIDDEN),
                                   activation=nn.SiLU)


class NormflowsGlow(nn.Module):
    def __init__(self):
        import normflows as nf

        super().__init__()
        bases, merges, flows = [], [], []
        levels, (channels, side, _) = GLOW["levels"], SHAPE
        for level in range(levels):  # coarse first
            width = channels * 2 ** (levels + 1 - level)
            blocks = [nf.flows.GlowBlock(width, GLOW["hidden"], split_mode="channel", scale=True)
                      for _ in range(GLOW["steps"])]
            flows.append([*blocks, nf.flows.Squeeze()])
            if level > 0:
                merges.append(nf.flows.Merge())
            scale = side // 2 ** (levels - level)
            shape = (width if level == 0 else width // 2, scale, scale)
            bases.append(nf.distributions.DiagGaussian(shape, trainable=False))
        self.flow = nf.MultiscaleFlow(bases, flows, merges)

    def loss(self, x):
        return self.flow.forward_kld(x)

    def draw(self, n):
        return self.flow.sample(n)[0]


def training(model, x, fused: bool):
    """A function of no arguments: forward, backward, Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=fused)

    def step():
        optimizer.zero_grad()
        model.loss(x).backward()
        optimizer.step()

    return step


def drawing(model, n: int):
    """A function of no arguments: n samples without gradients."""

    @torch.no_grad()
    def step():
        model.draw(n)

    return step


def vector_case() -> tuple[dict[str, nn.Module], torch.Tensor]:
    x = torch.randn(BATCH, FEATURES)
    ours = Ours(realnvp_vector(FEATURES, couplings=COUPLINGS, hidden=HIDDEN, depth=2), (FEATURES,))
    bare = Bare([perceptron() for _ in range(COUPLINGS)], [torch.randn(BATCH, FEATURES // 2)] * COUPLINGS)
    peers = {"nflows": Nflows, "zuko": Zuko, "normflows": Normflows}
    return {"bare": bare, "ours": ours, **present(peers)}, x


def glow_case() -> tuple[dict[str, nn.Module], torch.Tensor]:
    x = torch.randn(GLOW_BATCH, *SHAPE)
    bijection = glow(SHAPE, **GLOW)
    bijection.initialize(x)
    seen, networks = [], []
    for step in bijection.walk(x):
        if isinstance(step.layer, Coupling):
            networks.append(step.layer.net)
            seen.append(step.layer.split.take(step.x)[0].detach().contiguous())
    import copy

    models = {"bare": Bare(copy.deepcopy(networks), seen), "ours": Ours(bijection, SHAPE)}
    return {**models, **present({"normflows": NormflowsGlow})}, x


def maf_case() -> tuple[dict[str, nn.Module], torch.Tensor]:
    x = torch.randn(MAF_BATCH, MAF_FEATURES)
    bijection = neural_spline(MAF_FEATURES, layers=MAF_LAYERS, kind="autoregressive", transform="affine", hidden=HIDDEN)
    bare = Bare([perceptron(2 * MAF_FEATURES, MAF_FEATURES) for _ in range(MAF_LAYERS)], [x] * MAF_LAYERS)
    peers = {"nflows": NflowsMAF, "zuko": ZukoMAF}
    return {"bare": bare, "ours": Ours(bijection, (MAF_FEATURES,)), **present(peers)}, x


def present(peers: dict[str, type]) -> dict[str, nn.Module]:
    """The peers that are installed."""
    return {name: peer() for name, peer in peers.items() if importlib.util.find_spec(name)}


CASES = {"vector": vector_case, "glow": glow_case, "maf": maf_case}


def report(title: str, timing: Timing) -> None:
    """Each contestant as a multiple of the bare networks."""
    print(f"  {title}")
    for name in timing.seconds:
        if name != "bare":
            print("    " + timing.summary(name, "bare"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--compile", action="store_true", help="also measure our compiled density")
    parser.add_argument("--inner", type=int, default=3, help="steps in each timed unit")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.cases:
        torch.manual_seed(0)
        models, x = CASES[name]()
        sizes = ", ".join(f"{k} {sum(p.numel() for p in m.parameters()):,}" for k, m in models.items())
        print(f"{name}: batch {tuple(x.shape)}, parameters: {sizes}")
        steps = {key: training(model, x, fused=False) for key, model in models.items()}
        if arguments.compile:
            compiled = CASES[name]()[0]["ours"]
            compiled.flow.compile(fullgraph=True)
            steps["ours, compiled"] = training(compiled, x, fused=True)
        timing = interleaved({key: repeated(step, arguments.inner) for key, step in steps.items()},
                             arguments.repeats, warm_up=3)
        report("training step", timing)
        draws = {key: repeated(drawing(model, len(x)), arguments.inner) for key, model in models.items()}
        report("sampling", interleaved(draws, arguments.repeats, warm_up=2))


def repeated(work, times: int):
    """The same work several times, so that one unit is long compared with the clock's resolution."""

    def run():
        for _ in range(times):
            work()

    return run


if __name__ == "__main__":
    main()
