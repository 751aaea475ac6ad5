"""Quality for equal compute, side by side with peers: the same data, batches and number of parameters, one thread each.

    pip install normflows nflows denoising-diffusion-pytorch diffusers torchcfm torchebm
    python benchmarks/race.py glow --seconds 900 --root ~/data --out runs/race [--items 1000] [--samples 1000]
    python benchmarks/race.py glow realnvp --out runs/race --picture race.png    # more races; those that are done stay
    python benchmarks/race.py score_matching --seconds 60 --root ~/uci --data winequality-white.csv

The contestants of a race take turns, each in a process of its own: to 25 % of the budget, to 50 %, to the end. The
budget is CPU seconds of training: batches, noise, loss, backward, optimiser, building and initialisation, not imports
and evaluation. After each turn the negative log-likelihood of test items is taken, and the Frechet distance
of as many samples as test items in our features. A race that was stopped goes on where it was.

Parameters agree within 5 %. Our diffusion runs twice, with the plain network and as in our preset. Flows have Adam at
1e-3 throughout, those of RealNVP gradients of norm 1 at most, without which ours loses in a step what it learned in
minutes; the others have what their example or preset says, without a decay. A peer's flow gives log p(v) of v = (x +
u)/256, u uniform, hence 8 - log2 p(v)/D bits/dim, as ours does; before a race its density is compared with its base and
autograd's determinant, on 4 x 4 pixels. A peer's diffusion network is trained by its own loss and put in the place of
ours, on its own schedule, for our bound and our sampler.

Score matching runs on the white columns of a UCI table, split and filled as in uci_energy.py, with one network for all,
batches of 100 and Adam at 1e-3; in the place of bits/dim stands the exact score-matching loss of the test rows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from uci_energy import read, split

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.core.files import write_text, write_whole
from genmodels.core.random import KeyedGenerator
from genmodels.data.vision import MNIST, FashionMNIST
from genmodels.diffusion.schedule_discrete import DiscreteSchedule
from genmodels.energy import Energy, ExactScoreMatching, SlicedScoreMatchingVR
from genmodels.evaluation.features import Cache, Items, network_for
from genmodels.evaluation.fidelity import frechet_with_error
from genmodels.models.base import GenerativeModel
from genmodels.models.ddpm import DDPM
from genmodels.models.flow_matching import FlowMatchingModel
from genmodels.models.normalizing_flows import Glow, RealNVP
from genmodels.nn.energy_nets import EnergyMLP

DATA = {"mnist": MNIST, "fashion_mnist": FashionMNIST}
SHARES = (0.25, 0.5, 1.0)
FLOWS = ("glow", "realnvp")  # whose loss is in bits/dim
MISSING = 77  # the exit code of a turn whose package is not installed
UNET = {"channels": 32, "multipliers": [1, 2, 2], "blocks": 1, "attention_at": [7], "heads": 4}
SMALL = DataSpec("pixels", (1, 4, 4), levels=256)  # on which a peer's density is checked


@dataclass
class Contestant:
    """What is trained, and how it is used: `loss(batch, key)`, `bits(batch)` of each item, `draw(n, start)` or None.

    `model` holds all that is learned and averaged, `begin` takes the first batch, `after` the number of a step that is
    done, `clip` bounds the gradient, the rate rises in `warmup` steps; `density(v)` is a flow's (latents, log p).
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Batch, KeyedGenerator], Tensor]
    bits: Callable[[Batch], Tensor]
    draw: Callable[[int, int], Tensor] | None = None
    begin: Callable[[Batch], None] = lambda batch: None
    after: Callable[[int], None] = lambda step: None
    clip: float = math.inf
    warmup: int = 1
    density: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None


def ours(model: GenerativeModel, theirs: nn.Module | None = None) -> Contestant:
    """A model of genmodels: a flow by one dequantisation, diffusion by five terms of the bound and 50 steps.

    `theirs` has the weights where the network is a peer's.
    """
    asked, drawn = ({"draws": 5}, {"steps": 50}) if hasattr(model, "elbo") else ({}, {})

    def after(step: int) -> None:
        if model.ema is not None:
            model.ema.update(model.core, step)

    return Contestant(
        model, torch.optim.Adam((theirs or model.core).parameters(), lr=1e-3),
        lambda batch, key: model.loss(batch, key).value,
        lambda batch: -model.log_likelihood(batch, **asked).nats / (model.spec.dims * math.log(2)),
        lambda n, start: model.sample(n, start=start, **drawn).x, model.initialize, after,
    )


def in_evaluation(net: nn.Module, function: Callable) -> Callable:
    """A function that is called without gradients while a network is in evaluation mode."""

    @torch.no_grad()
    def call(*arguments):
        net.eval()
        found = function(*arguments)
        net.train()
        return found

    return call


def flow_of(spec: DataSpec, net: nn.Module, density: Callable, sample: Callable, optimizer=None) -> Contestant:
    """A peer's flow of v in [0, 1]: `density` gives latents and log p(v), `sample` n of v."""

    def bits(batch: Batch, key: KeyedGenerator) -> Tensor:
        v = (batch.x + key.uniform(batch.x.shape)) / spec.levels
        return math.log2(spec.levels) - density(v)[1] / (spec.dims * math.log(2))

    def draw(n: int, start: int) -> Tensor:
        torch.manual_seed(start)
        x = (sample(n).reshape(n, *spec.event_shape) * spec.levels).nan_to_num(0.0)
        return x.floor().clamp(0, spec.levels - 1).to(torch.uint8)

    return Contestant(
        net, optimizer or torch.optim.Adam(net.parameters(), lr=1e-3), lambda batch, key: bits(batch, key).mean(),
        in_evaluation(net, lambda batch: bits(batch, KeyedGenerator(0, batch.index, "dequantise"))),
        in_evaluation(net, draw), density=density,
    )


def normflows_glow(spec: DataSpec, example: bool = False) -> Contestant:
    """The Glow of the example of normflows with 2 levels, width 128, bases without classes; also with its optimiser."""
    import normflows as nf

    (channels, height, width), small = spec.event_shape, spec is SMALL
    steps, hidden = (2, 8) if small else (16, 128)
    bases, flows, merges = [], [], []
    for i in range(2):
        flows.append([nf.flows.GlowBlock(channels * 2 ** (3 - i), hidden, split_mode="channel", scale=True)
                      for _ in range(steps)] + [nf.flows.Squeeze()])  # fmt: skip
        down = 2 ** (2 - i)
        bases.append(nf.distributions.DiagGaussian((channels * down * (1 if i else 2), height // down, width // down)))
        merges += [nf.flows.Merge()] if i else []
    net = nf.MultiscaleFlow(bases, flows, merges, class_cond=False)

    def density(v: Tensor) -> tuple[Tensor | None, Tensor]:
        z = torch.cat([part.flatten(1) for part in net.inverse_and_log_det(v)[0]], 1) if small else None
        return z, net.log_prob(v, None)

    optimizer = torch.optim.Adamax(net.parameters(), lr=1e-3, weight_decay=1e-5) if example else None
    return flow_of(spec, net, density, lambda n: net.sample(n)[0], optimizer)


def nflows_realnvp(spec: DataSpec) -> Contestant:
    """Affine couplings of channels with residual networks, in the multi-scale transform of nflows.

    An actnorm before each of them, because alone they cannot enlarge a volume: their scales are below 1.001.
    """
    from nflows import distributions, flows, transforms
    from nflows.nn.nets import ConvResidualNet

    (channels, height, width), small = spec.event_shape, spec is SMALL
    size = {"hidden_channels": 8, "num_blocks": 1} if small else {"hidden_channels": 64, "num_blocks": 2}
    whole = transforms.MultiscaleCompositeTransform(2)
    for c, down in ((4 * channels, 2), (8 * channels, 4)):
        sign = torch.ones(c).index_fill(0, torch.arange(c // 2), -1)
        steps = [step for k in range(4) for step in (transforms.ActNorm(c), transforms.AffineCouplingTransform(
            sign * (-1) ** k, lambda i, o: ConvResidualNet(i, o, **size)))]
        level = transforms.CompositeTransform([transforms.SqueezeTransform(), *steps])
        whole.add_transform(level, (c, height // down, width // down))
    net = flows.Flow(whole, distributions.StandardNormal([spec.dims]))
    return flow_of(spec, net, lambda v: (net.transform_to_noise(v) if small else None, net.log_prob(v)), net.sample)


class AtLogSNR(nn.Module):
    """A peer's network, called as ours are, with the log-SNR. Its weights belong to the peer."""

    def __init__(self, call: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.call = call

    def forward(self, x: Tensor, log_snr: Tensor, cond: None = None) -> Tensor:
        return self.call(x, log_snr)


def by_step(network: Callable, schedule: DiscreteSchedule) -> AtLogSNR:
    """A network that takes the number of the step, 0 to T - 1, of a table of betas."""
    steps = schedule.num_steps
    return AtLogSNR(lambda x, log_snr: network(x, (schedule.time_of(log_snr) * steps - 1).round().long().clamp(min=0)))


def in_place_of_ours(model: GenerativeModel, theirs: nn.Module, optimizer, loss: Callable, **options) -> Contestant:
    """A peer's network and its loss of pixels in [-1, 1], evaluated and sampled by our model around that network."""
    by_us = ours(model, theirs)
    return Contestant(theirs, optimizer, lambda batch, key: loss(model.encode(batch.x)),
                      in_evaluation(theirs, by_us.bits), in_evaluation(theirs, by_us.draw), **options)  # fmt: skip


def lucidrains_ddpm(spec: DataSpec) -> Contestant:
    """denoising-diffusion-pytorch with its defaults, and the optimiser, clipping and averages of its trainer."""
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet
    from ema_pytorch import EMA

    unet = Unet(dim=28, dim_mults=(1, 2, 2), channels=1, full_attn=(False, False, True))
    theirs = GaussianDiffusion(unet, image_size=spec.event_shape[-1], timesteps=1000)
    average = EMA(theirs, beta=0.995, update_every=10)
    schedule = DiscreteSchedule(theirs.betas.double())
    model = DDPM(spec, net=by_step(average.ema_model.model, schedule), class_conditional=False, ema_decay=0.0)
    model.core.schedule = schedule
    return in_place_of_ours(model, nn.ModuleList([theirs, average]),
                            torch.optim.Adam(theirs.parameters(), lr=1e-4, betas=(0.9, 0.99)),
                            lambda x: theirs((x + 1) / 2), clip=1.0, after=lambda step: average.update())  # fmt: skip


def diffusers_ddpm(spec: DataSpec) -> Contestant:
    """UNet2DModel with the loss, optimiser, clipping and warm-up of the training example of diffusers."""
    from diffusers import DDPMScheduler, UNet2DModel

    unet = UNet2DModel(
        sample_size=spec.event_shape[-1], in_channels=1, out_channels=1, block_out_channels=(32, 64, 64),
        layers_per_block=1, down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"), attention_head_dim=16,
    )
    scheduler = DDPMScheduler(num_train_timesteps=1000)

    def network(x: Tensor, index: Tensor) -> Tensor:
        return unet(x, index, return_dict=False)[0]

    def loss(x: Tensor) -> Tensor:
        noise, index = torch.randn_like(x), torch.randint(0, 1000, (len(x),))
        return nn.functional.mse_loss(network(scheduler.add_noise(x, noise, index), index), noise)

    model = DDPM(spec, schedule="linear", parameterisation="eps", class_conditional=False, ema_decay=0.0,
                 net=by_step(network, DiscreteSchedule(scheduler.betas.double())))  # fmt: skip
    return in_place_of_ours(model, unet, torch.optim.AdamW(unet.parameters(), lr=1e-4), loss, clip=1.0, warmup=500)


def torchcfm_flow_matching(spec: DataSpec) -> Contestant:
    """torchcfm's MNIST example with attention at 7 x 7 and without classes: its U-Net, matcher and Adam."""
    from torchcfm.conditional_flow_matching import ConditionalFlowMatcher
    from torchcfm.models.unet import UNetModel

    unet = UNetModel(dim=spec.event_shape, num_channels=32, num_res_blocks=1, channel_mult=[1, 2, 2],
                     attention_resolutions="7", num_heads=4)  # fmt: skip
    matcher = ConditionalFlowMatcher(sigma=0.0)

    def loss(x: Tensor) -> Tensor:
        t, at, velocity = matcher.sample_location_and_conditional_flow(torch.randn_like(x), x)
        return (unet(t, at) - velocity).square().mean()

    model = FlowMatchingModel(spec, class_conditional=False, ema_decay=0.0, net=AtLogSNR(
        lambda x, log_snr: -unet(1 - model.core.schedule.time_of(log_snr).to(x), x)))  # their time runs to the data
    return in_place_of_ours(model, unet, torch.optim.Adam(unet.parameters()), loss)


def energy_of(spec: DataSpec, loss_of: Callable[[Energy], Callable[[Tensor, KeyedGenerator], Tensor]]) -> Contestant:
    """A perceptron of three hidden layers as energy, trained by `loss_of(energy)(x, key)`."""
    model, exact = Energy(EnergyMLP(spec.event_shape, hidden=(128,) * 3)), ExactScoreMatching()
    loss = loss_of(model)
    return Contestant(model, torch.optim.Adam(model.parameters(), lr=1e-3), lambda batch, key: loss(batch.x, key),
                      lambda batch: exact(model, batch.x).detach())  # fmt: skip


def our_sliced(model: Energy) -> Callable[[Tensor, KeyedGenerator], Tensor]:
    """The sliced loss with variance reduction, one direction."""
    loss = SlicedScoreMatchingVR()
    return lambda x, key: loss(model, x, key).mean()


def torchebm_sliced(model: Energy, projections: int) -> Callable[[Tensor, KeyedGenerator], Tensor]:
    """The sliced loss of torchebm on the same network."""
    from torchebm.core import BaseModel
    from torchebm.losses import SlicedScoreMatching

    class Same(BaseModel):
        def forward(self, x: Tensor) -> Tensor:
            return model.network(x)

    loss = SlicedScoreMatching(Same(), n_projections=projections)
    return lambda x, key: loss(x)


REALNVP = {"layout": ["squeeze", "channel*4", "split", "squeeze", "channel*4"], "hidden": 64, "depth": 2}
DIFFUSION = {"net": UNET, "class_conditional": False, "ema_decay": 0.999}
#: As in configs/preset: Fourier features of the pixels, and 100 steps of warm-up.
PRESET = DIFFUSION | {"net": UNET | {"fourier": [3, 4, 5, 6, 7]}}
#: The batch and the contestants of each race, ours first.
RACES: dict[str, tuple[int, dict[str, Callable[[DataSpec], Contestant]]]] = {
    "glow": (128, {
        "genmodels": lambda spec: ours(Glow(spec, levels=2, steps=16, hidden=128, ema_decay=0.0)),
        "normflows": normflows_glow,
        "normflows, its Adamax": lambda spec: normflows_glow(spec, example=True),
    }),
    "realnvp": (128, {
        "genmodels": lambda spec: replace(ours(RealNVP(spec, **REALNVP, ema_decay=0.0)), clip=1.0),
        "nflows": lambda spec: replace(nflows_realnvp(spec), clip=1.0)}),
    "ddpm": (64, {
        "genmodels": lambda spec: ours(DDPM(spec, **DIFFUSION)),
        "genmodels, its preset": lambda spec: replace(ours(DDPM(spec, objective="hybrid", **PRESET)), warmup=100),
        "denoising-diffusion-pytorch": lucidrains_ddpm, "diffusers": diffusers_ddpm}),
    "flow_matching": (64, {
        "genmodels": lambda spec: ours(FlowMatchingModel(spec, **DIFFUSION)),
        "genmodels, its preset": lambda spec: replace(ours(FlowMatchingModel(spec, **PRESET)), warmup=100),
        "torchcfm": torchcfm_flow_matching}),
    "score_matching": (100, {
        "genmodels": lambda spec: energy_of(spec, our_sliced),
        "torchebm": lambda spec: energy_of(spec, lambda model: torchebm_sliced(model, 1)),
        "torchebm, its 5 directions": lambda spec: energy_of(spec, lambda model: torchebm_sliced(model, 5))}),
}  # fmt: skip


def density_error(build: Callable[[DataSpec], Contestant]) -> float:
    """The largest error in nats of a peer's log p(v): against its normal base and autograd's determinant, float64."""
    torch.manual_seed(0)
    contestant, v = build(SMALL), torch.rand(8, *SMALL.event_shape, dtype=torch.float64)
    contestant.model.double()
    contestant.density(v)  # data-dependent layers
    errors = []
    with torch.no_grad():
        for name, value in contestant.model.named_parameters():
            if not name.startswith("q0"):  # the bases stay normal
                value.add_(0.1 * torch.randn_like(value))
    for one in v[:3, None]:
        z, nats = contestant.density(one)
        jacobian = torch.func.jacrev(lambda x: contestant.density(x)[0].flatten())(one).reshape(SMALL.dims, SMALL.dims)
        base = -0.5 * z.square().sum() - SMALL.dims / 2 * math.log(2 * math.pi)
        errors.append(base + torch.linalg.slogdet(jacobian)[1] - nats)
    return float(torch.stack(errors).detach().abs().max())


def prepared(given: argparse.Namespace, size: int) -> tuple[DataSpec, Batch, Batch]:
    """What a race runs on: its description, training and test items."""
    if given.data in DATA:
        data = DATA[given.data](root=given.root, download=False, batch_size=size).prepare()
        return data.spec, *(next(iter(data.loader(name, 60_000))) for name in ("train", "test"))
    rows = split(read(Path(given.root) / given.data), given.seed, "training")
    train, test = (Batch(rows[name], None, index=torch.arange(len(rows[name]))) for name in ("train", "test"))
    return DataSpec("table", tuple(train.x.shape[1:])), train, test


def turn(given: argparse.Namespace, race: str, name: str, file: Path) -> None:
    """Train one contestant to its next mark and evaluate it there; `file` holds what is known of it."""
    torch.set_num_threads(1)
    size, contestants = RACES[race]
    spec, train, test = prepared(given, size)
    state = torch.load(file.with_suffix(".pt"), weights_only=True) if file.exists() else None
    new = {"settings": settings(given), "curve": [], "marks": [], "skipped": 0}
    known = json.loads(state["known"]) if state else new
    step = len(known["curve"])
    torch.manual_seed(given.seed)
    began = time.process_time()
    contestant = contestants[name](spec)
    spent = known["curve"][-1][0] if step else time.process_time() - began
    if state:
        contestant.model.load_state_dict(state["model"])
        contestant.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["noise"])
    rates = [group.setdefault("full", group["lr"]) for group in contestant.optimizer.param_groups]
    while spent < SHARES[len(known["marks"])] * given.seconds:
        began = time.process_time()
        index = torch.arange(size) + step * size
        chosen = (KeyedGenerator(given.seed, index, "race").uniform((size,)) * len(train.x)).long()
        batch = train.rows(chosen)
        if step == 0:
            contestant.begin(batch)
        for group, rate in zip(contestant.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, (step + 1) / contestant.warmup)
        loss = contestant.loss(batch, KeyedGenerator(given.seed, index, "train"))
        contestant.optimizer.zero_grad()
        finite = bool(torch.isfinite(loss))
        if finite:  # others are left out, as in the example of normflows
            loss.backward()
            size_of_gradient = nn.utils.get_total_norm([p.grad for p in contestant.model.parameters()
                                                        if p.grad is not None])  # fmt: skip
            finite = bool(torch.isfinite(size_of_gradient))
        if finite:
            nn.utils.clip_grads_with_norm_(contestant.model.parameters(), contestant.clip, size_of_gradient)
            contestant.optimizer.step()
        contestant.after(step)
        spent, step = spent + time.process_time() - began, step + 1
        known["skipped"] += not finite
        known["curve"].append([round(spent, 3), float(loss.detach()) if finite else None])
    known["marks"].append({"seconds": spent, "steps": step, **evaluated(contestant, spec, train, test, given)})
    known["parameters"] = sum(p.numel() for group in contestant.optimizer.param_groups for p in group["params"])
    known["marks"][-1]["skipped"] = known["skipped"]
    state = {"model": contestant.model.state_dict(), "optimizer": contestant.optimizer.state_dict(),
             "noise": torch.get_rng_state(), "known": json.dumps(known)}  # fmt: skip
    write_whole(file.with_suffix(".pt"), lambda target: torch.save(state, target))
    write_text(file, state["known"])


def evaluated(contestant: Contestant, spec: DataSpec, train: Batch, test: Batch, given: argparse.Namespace) -> dict:
    """Bits/dim of the first test items, and the Frechet distance of as many samples as items, with standard errors."""
    parts = torch.arange(min(given.items, len(test.x))).split(250)
    values = torch.cat([contestant.bits(test.rows(part)) for part in parts]).double()
    likelihood = {"bits": float(values.mean()), "bits_se": float(values.std()) / math.sqrt(len(values)),
                  "items": len(values)}  # fmt: skip
    if contestant.draw is None:
        return likelihood
    cache = Cache(given.out / "features")
    features = network_for(Items(spec, train.x, test.x, train.cond, test.cond, spec.name, cache))
    drawn = torch.cat([contestant.draw(min(250, given.samples - k), k) for k in range(0, given.samples, 250)])
    distance = frechet_with_error(features(drawn), features(test.x[: given.samples]))
    return likelihood | {"frechet": distance.value, "frechet_se": distance.error, "samples": given.samples}


def run(given: argparse.Namespace, race: str) -> dict[str, dict]:
    """All turns that are not done, each in a process of its own; what is known of each contestant at the end."""
    found: dict[str, dict] = {}
    for number in range(len(SHARES)):
        for name, build in RACES[race][1].items():
            file = given.out / f"{race}-{name.replace(', ', '-').replace(' ', '-')}.json"
            before = json.loads(file.read_text()) if file.exists() else {"marks": [], "settings": settings(given)}
            if before["settings"] != settings(given):
                raise InputError(f"{file} is of another race, give another --out: {before['settings']}")
            marks = before["marks"]
            try:
                if not marks and name != "genmodels" and race in FLOWS:
                    error = density_error(build)
                    print(f"{race}: log p of {name} is wrong by {error:.1e} nats", flush=True)
                    if not error < 1e-6:
                        raise InputError(f"{race}: log p of {name} is wrong, and its figures would be")
                if len(marks) <= number:
                    words = [f"--{key}={getattr(given, key)}" for key in KEPT]
                    command = [sys.executable, __file__, race, "--turn", name, "--file", str(file), *words]
                    subprocess.run(command, check=True)
            except ImportError as missing:
                print(f"{race}: {name} is left out, {missing.name} is not installed", flush=True)
                continue
            except subprocess.CalledProcessError as failed:
                if failed.returncode == MISSING:
                    continue
                raise SystemExit(f"{race}: {name} ended with exit code {failed.returncode}") from None
            found[name] = json.loads(file.read_text())
            print(row(race, name, found[name], number), flush=True)
    return found


def row(race: str, name: str, known: dict, number: int) -> str:
    """A line of the table, with standard errors."""
    mark = known["marks"][number]
    distance = f"{mark['frechet']:.2f} ({mark['frechet_se']:.2f})" if "frechet" in mark else ""
    skipped = f", {mark['skipped']} of them skipped" if mark["skipped"] else ""
    return (f"| {race} | {name} | {known['parameters']:,} | {mark['seconds']:.0f} | {mark['steps']}{skipped} | "
            f"{mark['bits']:.4f} ({mark['bits_se']:.4f}) | {distance} |")


def picture(races: dict[str, dict[str, dict]], path: Path) -> None:
    """Learning curves: training loss, a running mean of twenty steps; of flows the test items too, at the marks."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(races), figsize=(5.5 * len(races), 4), squeeze=False, constrained_layout=True)
    for axis, (race, contestants) in zip(axes[0], races.items(), strict=True):
        ends = []
        for number, (name, known) in enumerate(contestants.items()):
            curve = [point for point in known["curve"] if point[1] is not None]
            smooth = [statistics.fmean(loss for _, loss in curve[k - 19 : k + 1]) for k in range(19, len(curve))]
            axis.plot([seconds for seconds, _ in curve[19:]], smooth, color=f"C{number}", label=name)
            ends += smooth[-1:]
            if race in FLOWS:
                marks = [(mark["seconds"], mark["bits"]) for mark in known["marks"]]
                axis.plot(*zip(*marks, strict=True), "o", color=f"C{number}", label=f"{name}, test")
        unit = "bits/dim" if race in FLOWS else "loss"
        axis.set(title=race, xlabel="CPU seconds of training, one thread", ylabel=unit)
        if ends and min(ends) > 0:
            axis.set_ylim(0, 3 * max(ends))
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=100)


KEPT = ("seconds", "data", "root", "out", "items", "samples", "seed")  # passed on to each turn


def settings(given: argparse.Namespace) -> dict:
    """What a contestant's results depend on."""
    return {key: getattr(given, key) for key in KEPT if key not in ("root", "out")}


def main() -> None:
    """Run the races, or one turn of one contestant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("races", nargs="+", choices=list(RACES))
    parser.add_argument("--seconds", type=float, default=900.0, help="CPU seconds of training for each contestant")
    parser.add_argument("--data", default="mnist", help="mnist, fashion_mnist, or the file of a UCI table")
    parser.add_argument("--root", default="data", help="folder of the data")
    parser.add_argument("--out", type=Path, default=Path("runs/race"))
    parser.add_argument("--items", type=int, default=10_000, help="test items, the first ones")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.turn is not None:
        try:
            turn(given, given.races[0], given.turn, given.file)
        except ImportError as missing:
            print(f"{given.races[0]}: {given.turn} is left out, {missing.name} is not installed", flush=True)
            sys.exit(MISSING)
        return
    for race in given.races:
        if (race == "score_matching") == (given.data in DATA):
            parser.error(f"{race} does not run on --data {given.data}: score_matching takes the file of a table, "
                         f"others {' or '.join(DATA)}")
    found = {race: run(given, race) for race in given.races}
    print("| race | contestant | parameters | CPU seconds | steps | bits/dim or exact loss | Fréchet distance |")
    print("|---" * 7 + "|")
    for race, contestants in found.items():
        for name, known in contestants.items():
            for number in range(len(known["marks"])):
                print(row(race, name, known, number))
    if given.picture is not None:
        picture(found, given.picture)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
