"""Steps of our networks and models compared with those of a peer of equal size, in one run.

    python benchmarks/step.py unet [--settings small mnist] [--channels-last]
    python benchmarks/step.py dit [--settings small S]
    python benchmarks/step.py flow_matching [--batch 64]
    python benchmarks/step.py coupling [--batch 256]

all with [--threads 1] [--repeats 7]. They take turns, and the ratio is formed within each round: a value below 1 means
that ours is faster. One thread counts its own time. Nothing is asserted; without the peer's package our times alone are
printed.

unet, dit: training and denoising steps against diffusers' `UNet2DModel` and `DiTTransformer2DModel`. Both get the same
    input, plain mean squared error, and the same `torch.optim.Adam`; the parameters are printed. The U-Net has the same
    channels per level, residual blocks, heads and dropout, attention at its lowest level (`AttnDownBlock2D`,
    `AttnUpBlock2D`) and in the middle; everything else is the default. The DiT has the same depth, width, heads,
    patches and classes, and learns no variance either; diffusers embeds the time in every block, ours once. Ours turns
    queries and keys by row and column, the peer adds sinusoids of the place at the entry; `plain` leaves ours without.
flow_matching: `FlowMatchingModel.loss` on integers, backward and AdamW, against torchcfm's `ConditionalFlowMatcher` and
    `UNetModelWrapper` on the same numbers already scaled to [-1, 1]. Both U-Nets have 32, 64 and 64 channels, one
    residual block a level, classes, and attention of four heads at 7x7; they differ in how the time enters.
coupling: how much of such a step, with the network of MNIST's preset, `Coupling("ot")` of its batch and fresh noise is.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import torch
from _timing import interleaved
from torch import nn

from genmodels.core.data import Batch, DataSpec
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion.flow_matching import Coupling
from genmodels.models.flow_matching import FlowMatchingModel
from genmodels.nn import DiT, UNet


class UNetSetting(NamedTuple):
    """One size at which two U-Nets meet."""

    event_shape: tuple[int, int, int]
    channels: int
    multipliers: tuple[int, ...]
    blocks: int
    batch: int
    heads: int = 4
    dropout: float = 0.0


class DiTSetting(NamedTuple):
    """One size at which the transformers meet."""

    event_shape: tuple[int, int, int]
    depth: int
    width: int
    heads: int
    batch: int


SETTINGS = {
    "unet": {"small": UNetSetting((1, 32, 32), channels=32, multipliers=(1, 2, 2), blocks=2, batch=32),
             "mnist": UNetSetting((1, 28, 28), channels=64, multipliers=(1, 2, 2), blocks=2, batch=32, dropout=0.1)},
    "dit": {"small": DiTSetting((1, 32, 32), 4, 128, 4, 32), "S": DiTSetting((4, 32, 32), 12, 384, 6, 4)},
}  # fmt: skip
CLASSES = 10


class Unwrapped(nn.Module):
    """A network of diffusers, called as ours: its time an index, its classes by name, its result a plain tensor."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x, t, cond=None):
        return self.network(x, timestep=t, class_labels=cond, return_dict=False)[0]


def unet_peer(setting: UNetSetting) -> nn.Module:
    from diffusers import UNet2DModel

    widths = tuple(setting.channels * m for m in setting.multipliers)
    plain = len(widths) - 1
    return UNet2DModel(
        sample_size=setting.event_shape[-1],
        in_channels=setting.event_shape[0],
        out_channels=setting.event_shape[0],
        block_out_channels=widths,
        layers_per_block=setting.blocks,
        down_block_types=("DownBlock2D",) * plain + ("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * plain,
        attention_head_dim=widths[-1] // setting.heads,
        dropout=setting.dropout,
    )


def dit_peer(setting: DiTSetting) -> nn.Module:
    from diffusers import DiTTransformer2DModel

    channels, side, _ = setting.event_shape
    return DiTTransformer2DModel(
        num_attention_heads=setting.heads, attention_head_dim=setting.width // setting.heads, in_channels=channels,
        out_channels=channels, num_layers=setting.depth, sample_size=side, patch_size=2, num_embeds_ada_norm=CLASSES,
    )  # fmt: skip


def training_step(loss, parameters, optimizer=torch.optim.Adam):
    """A function of no arguments: the loss, its gradients, and a step of the optimiser."""
    optimizer = optimizer(parameters, lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def denoising_step(network: nn.Module, given: tuple):
    """A function of no arguments: forward without gradients, in evaluation mode."""

    @torch.no_grad()
    def step() -> None:
        network.eval()(*given)
        network.train()

    return step


def report(what: str, steps: dict, peer: str, repeats: int) -> None:
    """Print the times of all, and ratios to the peer's if it is there."""
    # On one thread its own time is counted, whatever else the machine does.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    timing = interleaved(steps, repeats, warm_up=2, clock=clock)
    for own in (name for name in steps if name != peer):
        print(f"{what}: " + (timing.summary(own, peer) if peer in steps else
                             f"{own} {timing.median(own):.4f} s; no {peer} to compare with: pip install {peer}"))


def compare(name: str, networks: dict[str, nn.Module], make_peer, setting, repeats: int, cond: tuple = ()) -> None:
    """Print the parameters and both times of networks and a peer of diffusers."""
    try:
        networks["diffusers"] = Unwrapped(make_peer(setting))
    except ImportError:
        pass
    sizes = ", ".join(f"{key} {sum(p.numel() for p in net.parameters()):,}" for key, net in networks.items())
    print(f"{name}: batch {setting.batch} of {setting.event_shape}, parameters {sizes}")
    x, target = torch.randn(2, setting.batch, *setting.event_shape)
    log_snr, index = torch.linspace(-10, 10, setting.batch), torch.arange(setting.batch) * 31
    given = {key: (x, index if key == "diffusers" else log_snr, *cond) for key in networks}
    training = {key: training_step(lambda key=key: nn.functional.mse_loss(networks[key](*given[key]), target),
                                   net.parameters()) for key, net in networks.items()}  # fmt: skip
    report("  training step", training, "diffusers", repeats)
    denoising = {key: denoising_step(net, given[key]) for key, net in networks.items()}
    report("  denoising step", denoising, "diffusers", repeats)


def unet(setting: UNetSetting, name: str, given: argparse.Namespace) -> None:
    sizes = {key: value for key, value in setting._asdict().items() if key != "batch"}
    networks = {"ours": UNet(channels_last=given.channels_last, **sizes)}
    compare(name, networks, unet_peer, setting, given.repeats)


def dit(setting: DiTSetting, name: str, given: argparse.Namespace) -> None:
    sizes = {"depth": setting.depth, "width": setting.width, "heads": setting.heads, "places": False}
    networks = {key: DiT(setting.event_shape, CLASSES, attention=attention, **sizes)
                for key, attention in (("ours", "rope2d"), ("plain", "plain"))}  # fmt: skip
    compare(name, networks, dit_peer, setting, given.repeats, (torch.arange(setting.batch) % CLASSES,))


def our_step(x: torch.Tensor, cond: torch.Tensor, **options):
    """A training step of our flow matching on the batch, and its model."""
    net = {"channels": 32, "multipliers": [1, 2, 2], "blocks": 1, "attention_at": [7]} | options.pop("net")
    spec = DataSpec("mnist", tuple(x.shape[1:]), levels=256, num_classes=CLASSES)
    model, index = FlowMatchingModel(spec, net=net, ema_decay=0.0, **options), torch.arange(len(x))

    def loss() -> torch.Tensor:
        return model.loss(Batch(x, cond, index=index), KeyedGenerator(0, index, "train")).value

    return training_step(loss, model.core.parameters(), torch.optim.AdamW), model


def their_step(x: torch.Tensor, cond: torch.Tensor):
    """The same of torchcfm, and its network."""
    from torchcfm.conditional_flow_matching import ConditionalFlowMatcher
    from torchcfm.models.unet import UNetModel

    net = UNetModel(dim=tuple(x.shape[1:]), num_channels=32, num_res_blocks=1, channel_mult=[1, 2, 2], num_heads=4,
                    attention_resolutions="7", class_cond=True, num_classes=CLASSES)  # fmt: skip
    matcher, scaled = ConditionalFlowMatcher(sigma=0.0), x.float() / 127.5 - 1

    def loss() -> torch.Tensor:
        t, x_t, velocity = matcher.sample_location_and_conditional_flow(torch.randn_like(scaled), scaled)
        return nn.functional.mse_loss(net(t, x_t, cond), velocity)

    return training_step(loss, net.parameters(), torch.optim.AdamW), net


def flow_matching(x: torch.Tensor, cond: torch.Tensor, repeats: int) -> None:
    step, model = our_step(x, cond, cond_drop=0.0, net={"heads": 4})
    steps, networks = {"ours": step}, {"ours": model.core}
    try:
        steps["torchcfm"], networks["torchcfm"] = their_step(x, cond)
    except ImportError:
        pass
    for name, net in networks.items():
        print(f"{name}: {sum(p.numel() for p in net.parameters()):,} parameters")
    report("training step", steps, "torchcfm", repeats)


def coupling(x: torch.Tensor, cond: torch.Tensor, repeats: int) -> None:
    step, model = our_step(x, cond, net={"fourier": [3, 4, 5, 6, 7]})

    def ot() -> None:
        Coupling("ot")(model.encode(x), torch.randn(x.shape), None, KeyedGenerator(0, torch.arange(len(x)), "train"))

    report("coupling", {"ot": ot, "step": step}, "step", repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("unet", "dit", "flow_matching", "coupling"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--settings", nargs="+")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--batch", type=int)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    if given.what in SETTINGS:
        for name in given.settings or SETTINGS[given.what]:
            {"unet": unet, "dit": dit}[given.what](SETTINGS[given.what][name], name, given)
        return
    batch = given.batch or {"flow_matching": 64, "coupling": 256}[given.what]
    x, cond = torch.randint(0, 256, (batch, 1, 28, 28)).to(torch.uint8), torch.arange(batch) % CLASSES
    {"flow_matching": flow_matching, "coupling": coupling}[given.what](x, cond, given.repeats)


if __name__ == "__main__":
    main()
