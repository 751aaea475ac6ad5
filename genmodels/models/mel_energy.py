"""Text to mel by an energy around the mean that the text gives, trained by denoising score matching."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.diffusion import Denoiser, V, alpha_sigma, make_objective, make_schedule
from genmodels.energy import Potential
from genmodels.models.mel_diffusion import FINEST, MelDiffusion
from genmodels.models.optimizer import Optimizer
from genmodels.nn import UNet
from genmodels.speech.text_encoder import TextEncoder


class MelEnergy(MelDiffusion):
    """Text to mel by an energy of what a mel is beyond the mean that its text gives, at every noise level.

        u = y - m as for `MelDDPM`,   u_t = alpha_t u + sigma_t eps
        E(u_t, t | m) = 1/2 |u_t|^2 + (alpha_t/sigma_t) sum u_t f(u_t, t, m),    f a U-Net
        loss = |eps + sigma_t grad E(u_t, t | m)|^2 - sum P A* / (80 T) + mean (log d - log d_A*)^2

    The first term is denoising score matching at the noise levels of the schedule, weighted by their variance; the
    others are those of all aligned models of texts. The energies of different levels have no constant in common, so
    that E alone gives no likelihood. What is stated is the bound of the diffusion that runs back along these scores:

        log p(x | text) >= bound(u | m) - log C(T-1, N-1) - D log s

    `model=mel_ddpm` states the same of scores that are any field. Samples are drawn by annealed Langevin from N(m, I)
    down, or by the samplers of diffusion.

    Arguments:
        spec: the data set this model is built for, mels with texts.
        encoder: options of the text encoder, the one that all models of texts have.
        schedule: the noise schedule.
        num_steps: T, of the bound's terms and the most steps of a sampler of diffusion.
        time_sampler: how noise levels are drawn in training.
        net: options of the U-Net; each use costs its gradient too, two to three times `MelDDPM`'s.
        duration_channels: width of the duration predictor.
        speaker_channels: length of the speakers' vectors, where there are several.
        noise: width of the noise in log-mel units.
        optimizer: options of the optimiser.
        ema_decay: decay of the averaged weights, or several, 0 for none.

    Raises:
        InputError: for data without texts or without mels, and options that do not go together.

    Source: Song and Ermon 2019 (annealed Langevin); Salimans and Ho 2021 (energies of this form); Popov et al. 2021
    (the mean and the schedule).

    Example:
        >>> from genmodels.speech.text import CHARACTERS
        >>> text = {"symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": ["hello"]}
        >>> spec = DataSpec("speech", (4, 40), mel={}, statistics={"mean": -5.0, "std": 2.0}, text=text)
        >>> small = {"channels": 8, "depth": 1, "hidden": 8}
        >>> model = MelEnergy(spec, encoder=small, net={"channels": 8, "multipliers": [1, 2]}).eval()
        >>> model.sample(1, text="a cab", durations=[[2] * 5], steps=10).x.shape
        torch.Size([1, 4, 10])
    """

    family = "mel_energy"
    default_sampler = "annealed_langevin"
    tolerates_tf32 = False  # second derivatives

    def __init__(
        self,
        spec: DataSpec,
        *,
        encoder: TextEncoder | dict | None = None,
        schedule: Literal[
            "cosine", "linear", "linear_continuous", "grad_tts", "cosine_discrete", "sigmoid", "linear_log_snr"
        ] = "grad_tts",
        num_steps: int = 1000,
        time_sampler: Literal["uniform", "stratified", "antithetic", "loss_aware"] = "antithetic",
        net: UNet | dict | None = None,
        duration_channels: int = 256,
        speaker_channels: int = 64,
        noise: float = 0.05,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.999,
    ):
        super().__init__(spec, noise=noise, num_steps=num_steps, variance="beta")
        self.save_hyperparameters(ignore=["spec"], logger=False)
        unet = self.make_unet(net, speaker_channels)
        if not isinstance(unet.unet, UNet):
            raise InputError("model=mel_energy takes a U-Net: its scores are gradients of an energy, and the attention "
                             f"of a {type(unet.unet).__name__} can be differentiated once only")
        if unet.unet.checkpointing:
            raise InputError("model.net.checkpointing is not for model=mel_energy, whose scores are gradients already: "
                             "smaller batches (data.batch_size) take less memory")
        field = Potential(unet)
        denoiser = Denoiser(field, make_schedule(schedule, num_steps), V())
        trained = make_objective(
            "simple", denoiser, self.decoder, self.elbo.steps(denoiser.schedule), variance="beta",
            time_sampler=time_sampler,
        )
        self.assemble(encoder, denoiser, duration_channels, speaker_channels, trained)
        self.finish_setup(optimizer, ema_decay)

    def compiled_parts(self) -> list[nn.Module]:
        """Nothing: compiled code has no second derivatives."""
        return []

    @torch.no_grad()
    def energies(
        self, batch: Batch, *, log_snr: float = FINEST, weights: str | float = "ema", seed: int = 0
    ) -> Tensor:
        """(B,) E of what noisy mels are beyond the means of their best alignments, scaled down to a noise level.

        The noise is that of the mel alone, of width `noise`; none of the level is added.
        Differences between mels of one text, durations and level are those of -log p there; no others mean anything.

        Arguments:
            batch: items in the data's own units.
            log_snr: the noise level whose energy is asked for.
            weights, seed: see `log_likelihood`.
        """
        batch, noise = self.keyed(batch, seed)
        core = self.weights(weights)
        _, u, cond = self._around(core, self.units(batch, noise)[0], batch)
        level = torch.full((len(batch),), float(log_snr), device=u.device)
        alpha, _ = alpha_sigma(level)
        return core.denoiser.net.energy(alpha[:, None, None] * u, level, cond, batch.mask)
