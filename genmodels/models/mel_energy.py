"""Text to mel by an energy around the mean that the text gives, trained by denoising score matching."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.data.spec import Batch, DataSpec
from genmodels.diffusion import Denoiser, V, alpha_sigma
from genmodels.energy import NoiseConditionalScore, Potential, annealed_langevin
from genmodels.errors import InputError
from genmodels.flows.boundary import one_of
from genmodels.models.base import Samples
from genmodels.models.diffusion_course import USUAL
from genmodels.models.mel_diffusion import MelDiffusion
from genmodels.models.optimizer import Optimizer
from genmodels.nn import UNet
from genmodels.random import FrameKeyedGenerator
from genmodels.speech.text_encoder import TextEncoder

_LEVELS = 50  # of annealed Langevin, where nobody says
_FEWEST = 10  # levels; fewer leave noise of one level in the next
_EACH = 2  # Langevin steps at each of them
_STEP = 1.0  # step size over the squared noise level: a tenth of it, as is usual, needs ten times as many levels
_NOISIEST = -12.0  # log-SNR of the first level at least: the data are lost in four hundred times their deviation
_FINEST = 10.0  # log-SNR of the last level at most: a hundred and fiftieth of the deviation of the data


class Unscaled(NoiseConditionalScore):
    """The scores of a denoiser as those of data with noise added and nothing scaled down, for annealed Langevin.

        y = x/alpha,   sigma_bar = sigma/alpha = exp(-lambda/2),   score(y) = -eps/sigma_bar

    Arguments:
        denoiser: predicts at any log-SNR lambda.
        mask: `(B, 1, T)`, of the valid frames, or None.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(1, 1), 3.0)
        >>> y = torch.ones(1, 1, 2, dtype=torch.float64)
        >>> Unscaled(exact).score_at(y, torch.ones(1).double()).flatten().tolist()  # -y/(3 + 1)
        [-0.25, -0.25]
    """

    def __init__(self, denoiser: nn.Module, mask: Tensor | None = None):
        super().__init__(denoiser)
        self.mask = mask

    def score_at(self, x: Tensor, sigma: Tensor, cond: Tensor | None = None) -> Tensor:
        log_snr = -2 * torch.log(sigma.double())
        alpha, _ = alpha_sigma(log_snr)
        column = (-1, *(1,) * (x.dim() - 1))
        eps = self.network.at_log_snr(x * alpha.to(x).view(column), log_snr, cond, self.mask).eps
        return -eps / sigma.view(column)


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
        super().__init__(spec, noise=noise, num_steps=num_steps, variance="beta_tilde")
        self.save_hyperparameters(ignore=["spec"], logger=False)
        unet = self.make_unet(net, speaker_channels)
        if unet.unet.checkpointing:
            raise InputError("model.net.checkpointing is not for model=mel_energy, whose scores are gradients already: "
                             "smaller batches (data.batch_size) take less memory")
        field = Potential(unet)
        self.assemble(encoder, Denoiser(field, self.make_schedule(schedule), V()), duration_channels, speaker_channels)
        self.train_by(self.core.denoiser, "simple", "none", time_sampler)
        self.finish_setup(optimizer, ema_decay)

    def compiled_parts(self) -> list[nn.Module]:
        """Nothing: compiled code has no second derivatives."""
        return []

    @torch.no_grad()
    def energies(
        self, batch: Batch, *, log_snr: float = _FINEST, weights: str | float = "ema", seed: int = 0
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
        _, u, beside = self._around(core, self.units(batch, noise)[0], batch)
        level = torch.full((len(batch),), float(log_snr), device=u.device)
        alpha, _ = alpha_sigma(level)
        return core.denoiser.net.energy(alpha[:, None, None] * u, level, beside, batch.mask)

    def sample(
        self,
        n: int,
        cond: int | str | None = None,
        temperature: float = 0.667,
        seed: int = 0,
        *,
        start: int = 0,
        text: str | list[str] | None = None,
        speed: float = 1.0,
        seconds: float | None = None,
        durations: list[list[int]] | None = None,
        sampler: Literal[
            "annealed_langevin", "ddpm", "ddim", "euler", "heun", "edm", "dpmpp_2m", "unipc"
        ] = "annealed_langevin",
        steps: int | None = None,
        spacing: str | None = None,
        eta: float | None = None,
        churn: float | None = None,
        weights: str | float = "ema",
        on_unknown: Literal["error", "drop"] = "error",
    ) -> Samples:
        """Mels number `start` .. `start + n - 1` of a seed, of the texts in turn.

        Arguments:
            n: how many.
            cond: the speaker, by name or number; None for the first.
            temperature: scale of all noise around the text's mean; 1 for the model's own distribution.
            seed: the noise depends on (seed, text, which of that text's samples it is) alone.
            start: number of the first sample.
            text: a text, or several that are taken in turn; None for the examples that the checkpoint carries.
            speed: above 1 is faster.
            seconds: total time, instead of what the durations come to.
            durations: frames of every token, a list for each text, instead of predicted ones.
            sampler: `annealed_langevin`, or one that runs the diffusion back.
            steps: noise levels of annealed Langevin, at least 10, with two steps at each: 50, which makes deviations
                8 % too large (200: 2 %, 20: 22 %). Else as for `DDPM.sample`.
            spacing, eta, churn: of the other samplers, see `DDPM.sample`.
            weights: `ema`, `raw`, or one of the decays kept.
            on_unknown: `drop` characters without a symbol, or stop with an `error`.

        Raises:
            ValueError: for samplers and steps that do not exist.
            InputError: for texts or durations that cannot be spoken.
        """
        one_of("sampler", sampler, ("annealed_langevin", *USUAL))
        asked = self.asked(n, start, text, cond, on_unknown)
        noise, core = FrameKeyedGenerator(seed, asked.rows, "sample"), self.weights(weights)
        if sampler == "annealed_langevin":
            sigmas = self._levels(steps, spacing, eta, churn)
            mean, beside = self.spoken(asked, core, noise, temperature, speed, seconds, durations)
            u = annealed_langevin(
                Unscaled(core.denoiser, mean.mask), mean.z.shape, sigmas, noise.child("langevin"), cond=beside,
                steps_per_level=_EACH, step=_STEP * sigmas[-1] ** 2, temperature=temperature, dtype=mean.z.dtype,
                device=self.device,
            )
            made = {"sampler": sampler, "steps": len(sigmas), "evaluations": len(sigmas) * _EACH + 1}
        else:
            times, stepper, made = self.course(sampler, steps, spacing, eta, churn)
            mean, beside = self.spoken(asked, core, noise, temperature, speed, seconds, durations)
            out = self.run_back(core, mean, beside, noise, temperature, times, stepper)
            u = out.x
            made |= {"evaluations": out.evaluations}
        made |= {"seed": seed, "weights": str(weights), "temperature": temperature, "speed": speed}
        return self.as_mels(mean, u, asked, made | ({} if seconds is None else {"seconds": seconds}))

    def _levels(self, steps: int | None, *others) -> list[float]:
        """The noise levels sigma/alpha of annealed Langevin, geometric from that of t = 1 down."""
        if any(value is not None for value in others):
            raise ValueError("spacing, eta and churn are options of the other samplers, not of annealed_langevin")
        steps = _LEVELS if steps is None else steps
        if steps < _FEWEST:
            raise ValueError(f"steps must be at least {_FEWEST} noise levels for annealed_langevin, got {steps}: "
                             "sampler=dpmpp_2m takes fewer")
        ends = self.core.schedule.log_snr(torch.tensor([1.0, 0.0], dtype=torch.float64)).clamp(_NOISIEST, _FINEST)
        return torch.exp(-0.5 * torch.linspace(*ends.tolist(), steps, dtype=torch.float64)).tolist()
