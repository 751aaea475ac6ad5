"""Wall time of sampling compared with diffusers: the same number of network calls, an equal network, in one run.

    python benchmarks/sampler_time.py [--threads 2] [--repeats 5] [--steps 20] [--settings digits small]

Ours is `model.sample` of a DDPM, noise, decoding and all; theirs is diffusers' own DDIMPipeline, and for DPM-Solver++
2M the same loop with their scheduler (the pipeline passes arguments that it does not take). Their network is
`UNet2DModel` with our channels, blocks and attention; the parameters of both are printed. Both draw the same batch,
without classes. They take turns and the ratio is formed within each round: below 1 ours is faster. Nothing is asserted.
"""

from __future__ import annotations

import argparse

import torch
from _timing import interleaved
from step import UNetSetting, unet_peer

from genmodels.core.data import DataSpec
from genmodels.models.ddpm import DDPM

SETTINGS = {
    "digits": UNetSetting((1, 8, 8), channels=32, multipliers=(1, 2), blocks=1, batch=64),
    "small": UNetSetting((1, 32, 32), channels=32, multipliers=(1, 2, 2), blocks=2, batch=16),
}


def ours(setting: UNetSetting) -> DDPM:
    net = {"channels": setting.channels, "multipliers": list(setting.multipliers), "blocks": setting.blocks,
           "heads": setting.heads}  # fmt: skip
    return DDPM(DataSpec("images", setting.event_shape, levels=256), net=net, ema_decay=0.0).eval()


def theirs(setting: UNetSetting):
    """(network, DDIM pipeline, DPM-Solver++ loop), the last two as functions of the number of steps."""
    try:
        from diffusers import DDIMPipeline, DDIMScheduler, DPMSolverMultistepScheduler
    except ImportError:
        raise SystemExit("the peer is diffusers: pip install diffusers") from None

    network = unet_peer(setting).eval()
    pipeline = DDIMPipeline(network, DDIMScheduler(clip_sample=True))
    pipeline.set_progress_bar_config(disable=True)
    scheduler = DPMSolverMultistepScheduler(algorithm_type="dpmsolver++", solver_order=2, final_sigmas_type="zero")

    def ddim(steps: int):
        return pipeline(batch_size=setting.batch, num_inference_steps=steps, output_type="np").images

    @torch.no_grad()
    def dpm(steps: int):
        scheduler.set_timesteps(steps)
        x = torch.randn(setting.batch, *setting.event_shape)
        for t in scheduler.timesteps:
            x = scheduler.step(network(x, t).sample, t, x).prev_sample
        return (x / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()

    return network, ddim, dpm


def compare(name: str, steps: int, repeats: int) -> None:
    """Print the times of both samplers in one setting."""
    setting = SETTINGS[name]
    torch.manual_seed(0)
    model, (network, ddim, dpm) = ours(setting), theirs(setting)
    sizes = [sum(p.numel() for p in net.parameters()) for net in (model.core, network)]
    print(f"{name}: {setting.batch} images of {setting.event_shape}, {steps} steps, {sizes[0]:,} parameters against "
          f"{sizes[1]:,} ({sizes[0] / sizes[1] - 1:+.2%})")
    for sampler, peer in (("ddim", ddim), ("dpmpp_2m", dpm)):
        contestants = {
            "ours": lambda sampler=sampler: model.sample(setting.batch, sampler=sampler, steps=steps),
            "diffusers": lambda peer=peer: peer(steps),
        }
        timing = interleaved(contestants, repeats, warm_up=1)
        each = {key: 1000 * timing.median(key) / setting.batch for key in contestants}
        print(f"  {sampler}: {each['ours']:.2f} ms an image, diffusers {each['diffusers']:.2f} ms; "
              + timing.summary("ours", "diffusers"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.settings:
        compare(name, arguments.steps, arguments.repeats)


if __name__ == "__main__":
    main()
