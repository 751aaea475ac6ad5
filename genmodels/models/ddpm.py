"""Denoising diffusion (Ho, Jain, Abbeel 2020): trained on single terms of the ELBO, evaluated by all of them."""

from __future__ import annotations

from typing import Literal

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.diffusion import (
    PARAMETERISATIONS,
    Denoiser,
    Elbo,
    LevelSoftmax,
    default_ends,
    default_variance,
    make_objective,
    make_schedule,
)
from genmodels.diffusion.schedule_discrete import ScheduleName
from genmodels.models.diffusion import DiffusionModel


class DDPM(DiffusionModel):
    """A diffusion model: noise is added in steps, and a network learns to remove it.

        x_t = alpha_t x_0 + sigma_t eps,    loss = E |target - net(x_t, log SNR)|^2   (objective `simple`)
        -log p(x) <= KL(q(x_1|x)||N(0,I)) + sum_k KL(q(x_s|x_t,x)||p(x_s|x_t)) - E log p(x|x_0)   (reported)

    Integers 0..L-1 are mapped to [-1, 1] and the decoder gives their log-mass; continuous data are standardised by
    their training mean and standard deviation, whose volume is part of the density.

    Arguments:
        spec: the data set this model is built for.
        schedule: noise schedule; `cosine` is the continuous one with log-SNR in [-15, 15], `learned` is trained with
            the network, by the objectives `continuous` and `vlb`.
        log_snr_ends: log-SNR at t = 0 and at t = 1 of the schedules `cosine`, `linear_log_snr` and `learned`; their own
            by default.
        zero_terminal_snr: change the schedule so that no signal is left at t = 1.
        parameterisation: what the network predicts: `eps`, `x0`, `v` or `edm` (F of Karras et al. 2022).
        objective: `simple` (mean squared error), `vlb` (the bound itself), `hybrid` (simple, and the bound for learned
            variances) or `continuous` (the bound of infinitely many steps).
        weighting: of the noise levels in `simple` and `hybrid`: `none`, `min_snr`, `p2`, `edm` or `sigmoid`.
        time_sampler: how training draws its times: `uniform`, `stratified`, `antithetic`, or `loss_aware` (more often
            where the loss has been large).
        variance: variance of the reverse steps: `beta`, exact for Gaussian data; `beta_tilde`, exact for a single
            point; or `learned` with `hybrid` and `vlb`. By default learned with `hybrid`, else beta for continuous data
            and beta_tilde for integers.
        decoder: how integers are read from the cleanest level: a Gaussian around the network's estimate, cut into
            levels (`gaussian`), or from the noisy data alone (`level_softmax`).
        self_conditioning: the network also sees its last estimate of the data.
        **shared: what all diffusion models take, see `DiffusionModel`.

    Example:
        >>> spec = DataSpec("digits", (1, 8, 8), levels=17)
        >>> model = DDPM(spec, net={"channels": 8, "multipliers": [1, 2]}, num_steps=10)
        >>> model.sample(2, steps=3).x.shape
        torch.Size([2, 1, 8, 8])
    """

    family = "ddpm"

    def __init__(
        self,
        spec: DataSpec,
        *,
        schedule: ScheduleName = "cosine",
        log_snr_ends: list[float] | None = None,
        zero_terminal_snr: bool = False,
        parameterisation: Literal["eps", "x0", "v", "edm"] = "v",
        objective: Literal["simple", "vlb", "hybrid", "continuous"] = "simple",
        weighting: Literal["none", "min_snr", "p2", "edm", "sigmoid"] = "none",
        time_sampler: Literal["uniform", "stratified", "antithetic", "loss_aware"] = "antithetic",
        variance: Literal["beta", "beta_tilde", "learned"] | None = None,
        decoder: Literal["gaussian", "level_softmax"] = "gaussian",
        self_conditioning: bool = False,
        **shared,
    ):
        super().__init__(spec, **shared)
        if decoder == "level_softmax":
            if spec.levels is None:
                raise InputError(f"decoder=level_softmax is for integers, and {spec.name} is continuous: use gaussian")
            self.decoder = LevelSoftmax(spec.levels)
        variance = variance or default_variance(objective, spec.levels)
        if log_snr_ends is None:
            log_snr_ends = default_ends(schedule, self.decoder.finest_log_snr)
        self.decide(variance=variance, log_snr_ends=log_snr_ends)
        learned = variance == "learned"
        core = Denoiser(
            self.network(learned_variance=learned, self_conditioning=self_conditioning),
            make_schedule(schedule, self.num_steps, ends=log_snr_ends, zero_terminal_snr=zero_terminal_snr),
            PARAMETERISATIONS[parameterisation](), learned_variance=learned, self_conditioning=self_conditioning,
        )
        elbo = Elbo(self.decoder, self.num_steps, variance)
        trained = make_objective(
            objective, core, self.decoder, elbo.steps(core.schedule), variance=variance, weighting=weighting,
            time_sampler=time_sampler,
        )
        self.assemble(core, elbo, trained)
