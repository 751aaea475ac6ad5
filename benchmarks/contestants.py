"""The contestants of race.py: models of genmodels and of peers, with their losses, optimisers and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from genmodels.core.data import Batch, DataSpec
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion.schedule_discrete import DiscreteSchedule
from genmodels.energy import Energy, ExactScoreMatching, SlicedScoreMatchingVR
from genmodels.flows.scaling import Logit
from genmodels.models.base import GenerativeModel
from genmodels.models.ddpm import DDPM
from genmodels.models.flow_matching import FlowMatchingModel
from genmodels.models.normalizing_flows import Glow, RealNVP
from genmodels.nn.energy_nets import EnergyMLP

SMALL = DataSpec("pixels", (1, 4, 4), levels=256)  # on which a peer's density is checked
ALPHA = 0.05  # of the logits of the pixels, for our flows and for peers on logits
UNET = {"channels": 32, "multipliers": [1, 2, 2], "blocks": 1, "attention_at": [7], "heads": 4}


@dataclass
class Contestant:
    """What is trained, and its use: `loss(batch, key)`, `bits(batch, terms)` of each item, `draw(n, start)` or None.

    `model` holds all that is learned and averaged, `begin` takes the first batch, `after` the number of a step that is
    done, `clip` bounds the gradient, the rate rises in `warmup` steps and with `decay` falls by a cosine to zero at the
    end of the budget; `density(v)` is a flow's (latents, log p).
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Batch, KeyedGenerator], Tensor]
    bits: Callable[[Batch, int], Tensor]
    draw: Callable[[int, int], Tensor] | None = None
    begin: Callable[[Batch], None] = lambda batch: None
    after: Callable[[int], None] = lambda step: None
    clip: float = math.inf
    warmup: int = 1
    decay: bool = False
    density: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None


def ours(model: GenerativeModel, theirs: nn.Module | None = None, sampler: str | None = None) -> Contestant:
    """A model of genmodels: a flow by one dequantisation, diffusion by `terms` of the bound an item and 50 steps.

    `theirs` has the weights where the network is a peer's, `sampler` replaces the default of diffusion.
    """
    diffusion = hasattr(model, "elbo")

    def after(step: int) -> None:
        if model.ema is not None:
            model.ema.update(model.core, step)

    return Contestant(
        model, torch.optim.Adam((theirs or model.core).parameters(), lr=1e-3),
        lambda batch, key: model.loss(batch, key).value,
        lambda batch, terms: -model.log_likelihood(batch, **({"draws": terms} if diffusion else {})).nats
        / (model.spec.dims * math.log(2)),
        lambda n, start: model.sample(n, start=start, **({"steps": 50, "sampler": sampler} if diffusion else {})).x,
        model.initialize, after,
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


def flow_of(
    spec: DataSpec, net: nn.Module, density: Callable, sample: Callable, optimizer=None, logits: bool = False
) -> Contestant:
    """A peer's flow of v in [0, 1]: `density` gives latents and log p(v), `sample` n of v; or of the logits that ours
    take of v."""
    if logits:
        logit, of_logits, logits_of = Logit(ALPHA), density, sample

        def density(v: Tensor) -> tuple[Tensor | None, Tensor]:
            y, logdet = logit(v)
            z, nats = of_logits(y)
            return z, nats + logdet

        def sample(n: int) -> Tensor:
            return logit.inverse(logits_of(n))[0]

    def bits(batch: Batch, key: KeyedGenerator) -> Tensor:
        v = (batch.x + key.uniform(batch.x.shape)) / spec.levels
        return math.log2(spec.levels) - density(v)[1] / (spec.dims * math.log(2))

    def draw(n: int, start: int) -> Tensor:
        torch.manual_seed(start)
        x = (sample(n).reshape(n, *spec.event_shape) * spec.levels).nan_to_num(0.0)
        return x.floor().clamp(0, spec.levels - 1).to(torch.uint8)

    return Contestant(
        net, optimizer or torch.optim.Adam(net.parameters(), lr=1e-3), lambda batch, key: bits(batch, key).mean(),
        in_evaluation(net, lambda batch, terms: bits(batch, KeyedGenerator(0, batch.index, "dequantise"))),
        in_evaluation(net, draw), density=density,
    )


def normflows_glow(spec: DataSpec, example: bool = False, logits: bool = False) -> Contestant:
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
    return flow_of(spec, net, density, lambda n: net.sample(n)[0], optimizer, logits)


def nflows_realnvp(spec: DataSpec, logits: bool = False) -> Contestant:
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
    return flow_of(spec, net, lambda v: (net.transform_to_noise(v) if small else None, net.log_prob(v)), net.sample,
                   logits=logits)


class AtLogSNR(nn.Module):
    """A peer's network, called as ours are, with the log-SNR. Its weights belong to the peer."""

    def __init__(self, call: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.call = call

    def forward(self, x: Tensor, log_snr: Tensor, cond: None = None) -> Tensor:
        return self.call(x, log_snr)


def by_step(network: Callable, schedule: DiscreteSchedule) -> AtLogSNR:
    """A network that takes the number of the step, 0 to T - 1 and between, of a table of betas."""
    steps = schedule.num_steps
    return AtLogSNR(lambda x, log_snr: network(x, (schedule.time_of(log_snr) * steps - 1).clamp(min=0).to(x.dtype)))


def in_place_of_ours(
    model: GenerativeModel, theirs: nn.Module, optimizer, loss: Callable, sampler: str | None = None, **options
) -> Contestant:
    """A peer's network and its loss of pixels in [-1, 1], evaluated and sampled by our model around that network."""
    by_us = ours(model, theirs, sampler)
    return Contestant(theirs, optimizer, lambda batch, key: loss(model.encode(batch.x)),
                      in_evaluation(theirs, by_us.bits), in_evaluation(theirs, by_us.draw), **options)  # fmt: skip


def lucidrains_ddpm(spec: DataSpec, **averages) -> Contestant:
    """denoising-diffusion-pytorch with its defaults, and the optimiser, clipping and averages of its trainer.

    `averages` replaces options of these; as they are, they are 200 steps old after 400.
    """
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet
    from ema_pytorch import EMA

    unet = Unet(dim=28, dim_mults=(1, 2, 2), channels=1, full_attn=(False, False, True))
    theirs = GaussianDiffusion(unet, image_size=spec.event_shape[-1], timesteps=1000)
    average = EMA(theirs, **{"beta": 0.995, "update_every": 10, **averages})
    schedule = DiscreteSchedule(theirs.betas.double())
    model = DDPM(spec, net=by_step(average.ema_model.model, schedule), class_conditional=False, ema_decay=0.0)
    model.core.schedule = schedule
    return in_place_of_ours(model, nn.ModuleList([theirs, average]),
                            torch.optim.Adam(theirs.parameters(), lr=1e-4, betas=(0.9, 0.99)),
                            lambda x: theirs((x + 1) / 2), clip=1.0, after=lambda step: average.update())  # fmt: skip


def diffusers_ddpm(spec: DataSpec) -> Contestant:
    """UNet2DModel with the loss, optimiser, clipping, warm-up and decay of the training example of diffusers.

    Its samples are by `ddpm`, since by `dpmpp_2m` those of a network that predicts the noise keep some of it.
    """
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
    return in_place_of_ours(model, unet, torch.optim.AdamW(unet.parameters(), lr=1e-4), loss, "ddpm", clip=1.0,
                            warmup=500, decay=True)  # fmt: skip


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
                      lambda batch, terms: exact(model, batch.x).detach())  # fmt: skip


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


def at_our_rate(contestant: Contestant, rate: float = 1e-3) -> Contestant:
    """The same with the rate, warm-up, decay and clipping of our presets of diffusion."""
    for group in contestant.optimizer.param_groups:
        group["lr"] = rate
    return replace(contestant, warmup=100, decay=True, clip=1.0)


REALNVP = {"layout": ["squeeze", "channel*4", "split", "squeeze", "channel*4"], "hidden": 64, "depth": 2,
           "alpha": ALPHA}  # fmt: skip
DIFFUSION = {"net": UNET, "class_conditional": False, "ema_decay": 0.999}
#: As in configs/preset: Fourier features of the pixels.
PRESET = DIFFUSION | {"net": UNET | {"fourier": [3, 4, 5, 6, 7]}}
#: As in experiment=ddpm_mnist_likelihood.
BOUND = PRESET | {"objective": "hybrid", "schedule": "linear_log_snr"}
#: The batch and the contestants of each race, ours first.
RACES: dict[str, tuple[int, dict[str, Callable[[DataSpec], Contestant]]]] = {
    "glow": (128, {
        "genmodels": lambda spec: ours(Glow(spec, levels=2, steps=16, hidden=128, alpha=ALPHA, ema_decay=0.0)),
        "normflows": normflows_glow,
        "normflows, its Adamax": lambda spec: normflows_glow(spec, example=True),
        "normflows, on logits": lambda spec: normflows_glow(spec, logits=True),
    }),
    "realnvp": (128, {
        "genmodels": lambda spec: replace(ours(RealNVP(spec, **REALNVP, ema_decay=0.0)), clip=1.0),
        "nflows": lambda spec: replace(nflows_realnvp(spec), clip=1.0),
        "nflows, on logits": lambda spec: replace(nflows_realnvp(spec, logits=True), clip=1.0)}),
    "ddpm": (64, {
        "genmodels": lambda spec: at_our_rate(ours(DDPM(spec, **DIFFUSION))),
        "genmodels, for likelihood": lambda spec: at_our_rate(ours(DDPM(spec, **BOUND)), 2e-3),
        "denoising-diffusion-pytorch": lucidrains_ddpm,
        "denoising-diffusion-pytorch, our rate": lambda spec: at_our_rate(
            lucidrains_ddpm(spec, beta=0.999, update_every=1, update_after_step=0)),
        "diffusers": diffusers_ddpm,
        "diffusers, our rate": lambda spec: at_our_rate(diffusers_ddpm(spec))}),
    "flow_matching": (64, {
        "genmodels": lambda spec: at_our_rate(ours(FlowMatchingModel(spec, **DIFFUSION))),
        "genmodels, its preset": lambda spec: at_our_rate(ours(FlowMatchingModel(spec, **PRESET))),
        "genmodels, log-uniform times": lambda spec: at_our_rate(
            ours(FlowMatchingModel(spec, **PRESET, time_sampler="log_uniform"))),
        "torchcfm": torchcfm_flow_matching,
        "torchcfm, our rate": lambda spec: at_our_rate(torchcfm_flow_matching(spec))}),
    "score_matching": (100, {
        "genmodels": lambda spec: energy_of(spec, our_sliced),
        "torchebm": lambda spec: energy_of(spec, lambda model: torchebm_sliced(model, 1)),
        "torchebm, its 5 directions": lambda spec: energy_of(spec, lambda model: torchebm_sliced(model, 5))}),
}  # fmt: skip
