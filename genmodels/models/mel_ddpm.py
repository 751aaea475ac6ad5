"""Text to mel by diffusion around the mean that the text gives (Popov et al. 2021, Grad-TTS), with its bound."""

from __future__ import annotations

from typing import Literal

from genmodels.core.data import DataSpec
from genmodels.diffusion import PARAMETERISATIONS, Denoiser, default_variance, make_objective, make_schedule
from genmodels.diffusion.schedule_discrete import ScheduleName
from genmodels.models.mel_diffusion import MelDiffusion
from genmodels.models.optimizer import Optimizer
from genmodels.nn import DiT, UNet
from genmodels.speech.text_encoder import TextEncoder


class MelDDPM(MelDiffusion):
    """Text to mel by a diffusion model of what a mel is beyond the mean that its text gives.

        P_ij = log N(y_j; mu_i, I),  y the whitened noisy mel;    A* = the best monotonic alignment,  m_j = mu_A*(j)
        u = y - m,   u_t = alpha_t u + sigma_t eps,    at t = 1 the mel is N(m, temperature^2 I)
        loss = objective(u | m) - sum P A* / (80 T) + mean (log d - log d_A*)^2
        log p(x | text) >= bound(u | m) - log C(T-1, N-1) - D log s

    The shift by m has no volume, so a bound on log p(u | m) is one on log p(y | text, A*), and with the prior of that
    one alignment, 1 / C(T-1, N-1), one on the sum over all of them: the quantity that `model=glow_tts` states. The
    value without the prior is reported apart, since A* has seen the mel.

    Arguments:
        spec: the data set this model is built for, mels with texts.
        encoder: options of the text encoder, the one that all models of texts have.
        schedule, zero_terminal_snr, parameterisation, objective, weighting, num_steps, time_sampler, variance,
            self_conditioning: see `DDPM`.
        net: options of the U-Net, or of the class that `_target_` names (`model.net=dit`).
        duration_channels: width of the duration predictor.
        speaker_channels: length of the speakers' vectors, where there are several.
        noise: width of the noise in log-mel units.
        optimizer: options of the optimiser.
        ema_decay: decay of the averaged weights, or several, 0 for none.

    Raises:
        InputError: for data without texts or without mels, and options that do not go together.

    Example:
        >>> from genmodels.speech.text import CHARACTERS
        >>> text = {"symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": ["hello"]}
        >>> spec = DataSpec("speech", (4, 40), mel={}, statistics={"mean": -5.0, "std": 2.0}, text=text)
        >>> small = {"channels": 8, "depth": 1, "hidden": 8}
        >>> model = MelDDPM(spec, encoder=small, net={"channels": 8, "multipliers": [1, 2]}).eval()
        >>> model.sample(1, text="a cab", durations=[[2] * 5], steps=3).x.shape
        torch.Size([1, 4, 10])
    """

    family = "mel_ddpm"
    default_sampler = "dpmpp_2m"

    def __init__(
        self,
        spec: DataSpec,
        *,
        encoder: TextEncoder | dict | None = None,
        schedule: ScheduleName = "grad_tts",
        zero_terminal_snr: bool = False,
        parameterisation: Literal["eps", "x0", "v", "edm"] = "v",
        objective: Literal["simple", "vlb", "hybrid", "continuous"] = "simple",
        weighting: Literal["none", "min_snr", "p2", "edm", "sigmoid"] = "none",
        num_steps: int = 1000,
        time_sampler: Literal["uniform", "stratified", "antithetic", "loss_aware"] = "antithetic",
        variance: Literal["beta", "beta_tilde", "learned"] | None = None,
        self_conditioning: bool = False,
        net: UNet | DiT | dict | None = None,
        duration_channels: int = 256,
        speaker_channels: int = 64,
        noise: float = 0.05,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.999,
    ):
        super().__init__(spec, noise=noise, num_steps=num_steps,
                         variance=variance or default_variance(objective, None))
        self.save_hyperparameters(ignore=["spec"], logger=False)
        self.decide(variance=self.variance)
        unet = self.make_unet(net, speaker_channels, spec.event_shape[0] if self_conditioning else 0)
        denoiser = Denoiser(
            unet, make_schedule(schedule, num_steps, finest=self.decoder.finest_log_snr,
                                zero_terminal_snr=zero_terminal_snr),
            PARAMETERISATIONS[parameterisation](), learned_variance=self.variance == "learned",
            self_conditioning=self_conditioning,
        )
        trained = make_objective(
            objective, denoiser, self.decoder, self.elbo.steps(denoiser.schedule), variance=self.variance,
            weighting=weighting, time_sampler=time_sampler,
        )
        self.assemble(encoder, denoiser, duration_channels, speaker_channels, trained)
        self.finish_setup(optimizer, ema_decay)
