"""Text to mel by flow matching (Mehta et al. 2024, Matcha-TTS), with its bound and its likelihood by the ODE."""

from __future__ import annotations

from typing import Literal

from genmodels.core.data import DataSpec
from genmodels.diffusion import Denoiser
from genmodels.diffusion.flow_matching import FlowMatching, PathName, make_path, velocity_of
from genmodels.models.mel_diffusion import MelDiffusion
from genmodels.models.optimizer import Optimizer
from genmodels.nn import DiT, UNet
from genmodels.speech.text_encoder import TextEncoder


class MelFlowMatching(MelDiffusion):
    """Text to mel by a flow from noise to what a mel is beyond the mean that its text gives.

        u = y - m as for `MelDDPM`,    u_t = alpha(t) u + sigma(t) eps,    du_t/dt = v(u_t, t | m)
        loss = E |alpha' u + sigma' eps - v(u_t, t | m)|^2 - sum P A* / (80 T) + mean (log d - log d_A*)^2

    At t = 1 the mel is N(m, temperature^2 I); the lines are straight, so that a few steps of Euler lead to speech.
    Matcha-TTS learns y itself, given m, from N(0, temperature^2 I), with sigma_min 1e-4. Encoder, aligner, durations,
    bound and samplers are those of `MelDDPM`.

    Arguments:
        spec: the data set this model is built for, mels with texts.
        encoder: options of the text encoder, the one that all models of texts have.
        path, sigma_min, time_sampler: see `FlowMatchingModel`.
        num_steps: T, the number of steps of the bound, and the most of a sampler.
        net: options of the U-Net, or of the class that `_target_` names (`model.net=dit`).
        duration_channels: width of the duration predictor.
        speaker_channels: length of the speakers' vectors, where there are several.
        noise: width of the noise in log-mel units.
        optimizer: options of the optimiser.
        ema_decay: decay of the averaged weights, or several, 0 for none.

    Raises:
        InputError: for data without texts or without mels, and options that do not go together.

    Source: Mehta et al., "Matcha-TTS: a fast TTS architecture with conditional flow matching", 2024, section 3.

    Example:
        >>> from genmodels.speech.text import CHARACTERS
        >>> text = {"symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": ["hello"]}
        >>> spec = DataSpec("speech", (4, 40), mel={}, statistics={"mean": -5.0, "std": 2.0}, text=text)
        >>> small = {"channels": 8, "depth": 1, "hidden": 8}
        >>> model = MelFlowMatching(spec, encoder=small, net={"channels": 8, "multipliers": [1, 2]}).eval()
        >>> model.sample(1, text="a cab", durations=[[2] * 5], steps=4).x.shape
        torch.Size([1, 4, 10])
    """

    family = "mel_flow_matching"
    default_sampler = "euler"
    default_steps = {"steps": 10, "spacing": "uniform_t"}

    def __init__(
        self,
        spec: DataSpec,
        *,
        encoder: TextEncoder | dict | None = None,
        path: PathName = "linear",
        sigma_min: float = 0.0,
        time_sampler: Literal[
            "uniform", "stratified", "antithetic", "loss_aware", "logit_normal", "cosmap"
        ] = "antithetic",
        num_steps: int = 1000,
        net: UNet | DiT | dict | None = None,
        duration_channels: int = 256,
        speaker_channels: int = 64,
        noise: float = 0.05,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.999,
    ):
        super().__init__(spec, noise=noise, num_steps=num_steps, variance="beta")
        self.save_hyperparameters(ignore=["spec"], logger=False)
        followed = make_path(path, num_steps, sigma_min=sigma_min)
        denoiser = Denoiser(self.make_unet(net, speaker_channels), followed, velocity_of(followed))
        objective = FlowMatching(time_sampler=time_sampler)
        objective.check(denoiser)
        self.assemble(encoder, denoiser, duration_channels, speaker_channels, objective)
        self.finish_setup(optimizer, ema_decay)
