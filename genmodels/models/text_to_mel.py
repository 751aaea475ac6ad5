"""Text to mel by diffusion around the mean of the text, by flow matching, and by an energy-based model."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, an
from genmodels.diffusion import (
    PARAMETERISATIONS,
    Denoiser,
    V,
    alpha_sigma,
    default_variance,
    make_objective,
    make_schedule,
)
from genmodels.diffusion.flow_matching import FlowMatching, PathName, make_path, velocity_of
from genmodels.diffusion.schedule_discrete import ScheduleName
from genmodels.energy import Potential
from genmodels.models.mel_diffusion import FINEST, MelDiffusion
from genmodels.nn import UNet


class MelDDPM(MelDiffusion):
    """Text to mel by a diffusion model of the difference between a mel and the mean of its text.

        P_ij = log N(y_j; mu_i, I),  y the whitened noisy mel;    A* = the best monotonic alignment,  m_j = mu_A*(j)
        u = y - m,   u_t = alpha_t u + sigma_t eps,    at t = 1 the mel is N(m, temperature^2 I)
        loss = objective(u | m) - sum P A* / (80 T) + mean (log d - log d_A*)^2
        log p(x | text) >= bound(u | m) - log C(T-1, N-1) - D log s

    The shift by m has no volume, so a bound on log p(u | m) is one on log p(y | text, A*), and with the prior of that
    alignment, 1 / C(T-1, N-1), one on the sum over all alignments: the quantity that `model=glow_tts` states. The value
    without the prior is reported separately, since A* depends on the mel.

    Arguments:
        spec: the data set this model is built for, mels with texts.
        schedule: the noise schedule.
        zero_terminal_snr: change the schedule so that no signal is left at t = 1.
        parameterisation: what the network predicts, see `DDPM`.
        objective: what is minimised, see `DDPM`.
        weighting: of the noise levels in `simple` and `hybrid`.
        time_sampler: how training draws its times.
        variance: variance of the reverse steps; by default `learned` with `hybrid`, else `beta`.
        self_conditioning: the network also sees its last estimate of the data.
        **shared: what all of these models take, see `MelDiffusion`.

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
        schedule: ScheduleName = "grad_tts",
        zero_terminal_snr: bool = False,
        parameterisation: Literal["eps", "x0", "v", "edm"] = "v",
        objective: Literal["simple", "vlb", "hybrid", "continuous"] = "simple",
        weighting: Literal["none", "min_snr", "p2", "edm", "sigmoid"] = "none",
        time_sampler: Literal["uniform", "stratified", "antithetic", "loss_aware"] = "antithetic",
        variance: Literal["beta", "beta_tilde", "learned"] | None = None,
        self_conditioning: bool = False,
        **shared,
    ):
        super().__init__(spec, **shared)
        self.set_variance(variance or default_variance(objective, None))
        self.decide(variance=self.variance)
        denoiser = Denoiser(
            self.make_unet(spec.event_shape[0] if self_conditioning else 0),
            make_schedule(schedule, self.num_steps, finest=self.decoder.finest_log_snr,
                          zero_terminal_snr=zero_terminal_snr),
            PARAMETERISATIONS[parameterisation](), learned_variance=self.variance == "learned",
            self_conditioning=self_conditioning,
        )
        trained = make_objective(
            objective, denoiser, self.decoder, self.elbo.steps(denoiser.schedule), variance=self.variance,
            weighting=weighting, time_sampler=time_sampler,
        )
        self.assemble_around(denoiser, trained)


class MelFlowMatching(MelDiffusion):
    """Text to mel by a flow from noise to the difference between a mel and the mean of its text.

        u = y - m as for `MelDDPM`,    u_t = alpha(t) u + sigma(t) eps,    du_t/dt = v(u_t, t | m)
        loss = E |alpha' u + sigma' eps - v(u_t, t | m)|^2 - sum P A* / (80 T) + mean (log d - log d_A*)^2

    At t = 1 the mel is N(m, temperature^2 I); the paths are straight, so that a few Euler steps suffice. Matcha-TTS
    learns y itself, given m, from N(0, temperature^2 I), with sigma_min 1e-4. Encoder, aligner, durations, bound and
    samplers are those of `MelDDPM`.

    Arguments:
        spec: the data set this model is built for, mels with texts.
        path: `linear`, `cosine`, or a noise schedule of `DDPM` by its name after `vp_`.
        sigma_min: noise that `linear` leaves at t = 0.
        time_sampler: how training draws its times.
        **shared: what all of these models take, see `MelDiffusion`.

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
        path: PathName = "linear",
        sigma_min: float = 0.0,
        time_sampler: Literal[
            "uniform", "stratified", "antithetic", "loss_aware", "logit_normal", "cosmap"
        ] = "antithetic",
        **shared,
    ):
        super().__init__(spec, **shared)
        followed = make_path(path, self.num_steps, sigma_min=sigma_min)
        denoiser = Denoiser(self.make_unet(), followed, velocity_of(followed))
        objective = FlowMatching(time_sampler=time_sampler)
        objective.check(denoiser)
        self.assemble_around(denoiser, objective)


class MelEnergy(MelDiffusion):
    """Text to mel by an energy of the difference between a mel and the mean of its text, at every noise level.

        u = y - m as for `MelDDPM`,   u_t = alpha_t u + sigma_t eps
        E(u_t, t | m) = 1/2 |u_t|^2 + (alpha_t/sigma_t) sum u_t f(u_t, t, m),    f a U-Net
        loss = |eps + sigma_t grad E(u_t, t | m)|^2 - sum P A* / (80 T) + mean (log d - log d_A*)^2

    The first term is denoising score matching at the noise levels of the schedule, weighted by their variance; the
    others are those of all aligned models of texts. The energies of different levels have unrelated constants, so that
    E alone gives no likelihood. Reported is the bound of the reverse diffusion with these scores:

        log p(x | text) >= bound(u | m) - log C(T-1, N-1) - D log s

    `model=mel_ddpm` reports the same bound for scores that need not be gradients. Samples are drawn by annealed
    Langevin from N(m, I), or by the samplers of diffusion.

    Arguments:
        spec: the data set this model is built for, mels with texts.
        schedule: the noise schedule.
        time_sampler: how noise levels are drawn in training.
        net: options of the U-Net; each evaluation also takes its gradient, at two to three times the cost of `MelDDPM`.
        **shared: what all of these models take, see `MelDiffusion`.

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
        schedule: Literal[
            "cosine", "linear", "linear_continuous", "grad_tts", "cosine_discrete", "sigmoid", "linear_log_snr"
        ] = "grad_tts",
        time_sampler: Literal["uniform", "stratified", "antithetic", "loss_aware"] = "antithetic",
        net: UNet | dict | None = None,
        **shared,
    ):
        super().__init__(spec, net=net, **shared)
        unet = self.make_unet()
        if not isinstance(unet.unet, UNet):
            raise InputError("model=mel_energy takes a U-Net: its scores are gradients of an energy, and the attention "
                             f"of {an(type(unet.unet).__name__)} can be differentiated once only")
        if unet.unet.checkpointing:
            raise InputError("model.net.checkpointing is not for model=mel_energy, whose scores are gradients already: "
                             "smaller batches (data.batch_size) take less memory")
        denoiser = Denoiser(Potential(unet), make_schedule(schedule, self.num_steps), V())
        trained = make_objective(
            "simple", denoiser, self.decoder, self.elbo.steps(denoiser.schedule), variance="beta",
            time_sampler=time_sampler,
        )
        self.assemble_around(denoiser, trained)

    def compiled_parts(self) -> list[nn.Module]:
        """Nothing: compiled code has no second derivatives."""
        return []

    @torch.no_grad()
    def energies(
        self, batch: Batch, *, log_snr: float = FINEST, weights: str | float = "ema", seed: int = 0
    ) -> Tensor:
        """(B,) E of noisy mels around the means of their best alignments, scaled by alpha of a noise level.

        The noise is that of the mel, of width `noise`; no noise of the level is added. Only differences between mels of
        the same text, durations and level are meaningful: they are those of -log p.

        Arguments:
            batch: items in the data's own units.
            log_snr: the noise level of the energy.
            weights, seed: see `log_likelihood`.
        """
        batch, noise = self.keyed(batch, seed)
        core = self.weights(weights)
        _, u, cond = self._around(core, self.units(batch, noise)[0], batch)
        level = torch.full((len(batch),), float(log_snr), device=u.device)
        alpha, _ = alpha_sigma(level)
        return core.denoiser.net.energy(alpha[:, None, None] * u, level, cond, batch.mask)
