"""Denoising diffusion (Ho, Jain, Abbeel 2020), with a free network or with an energy at every noise level."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, an, at_least, one_of
from genmodels.core.random import KeyedGenerator
from genmodels.core.tensors import outside_inference
from genmodels.diffusion import (
    PARAMETERISATIONS,
    Denoiser,
    LevelSoftmax,
    V,
    alpha_sigma,
    default_ends,
    default_variance,
    make_schedule,
)
from genmodels.diffusion.objectives import ObjectiveName
from genmodels.diffusion.schedule_discrete import ScheduleName
from genmodels.diffusion.weighting import WeightingName
from genmodels.energy import DiffusionImportanceSampling, LogPartition, NoiseLevels, Potential
from genmodels.models.diffusion import DiffusionModel
from genmodels.nn import MLPDenoiser, UNet

LEVEL = 4.0  # default log-SNR of energies: noise of an eighth of the largest value of the data
_ROUNDING = 1e-6  # tolerance at the ends of a schedule
_WHOLE = (torch.int64, torch.int32)  # types of labels


class DDPM(DiffusionModel):
    """A diffusion model: noise is added in steps, and a network learns to remove it.

        x_t = alpha_t x_0 + sigma_t eps,    loss = E |target - net(x_t, log SNR)|^2   (objective `simple`)
        -log p(x) <= KL(q(x_1|x)||N(0,I)) + sum_k E_q KL(q(x_s|x_t,x)||p(x_s|x_t)) - E_q log p(x|x_{t_0})  (reported)

    Integers 0..L-1 are mapped to [-1, 1] and the decoder gives their log-mass; continuous data are standardised by
    their training mean and standard deviation, whose volume is part of the density.

    Arguments:
        schedule: noise schedule; `cosine` is the continuous one with log-SNR in [-15, 15], `learned` is trained with
            the network, by the objectives `continuous` and `vlb`.
        log_snr_ends: log-SNR at t = 0 and at t = 1 of the schedules `cosine`, `linear_log_snr` and `learned`; their own
            by default.
        zero_terminal_snr: change the schedule so that no signal is left at t = 1.
        parameterisation: what the network predicts: `eps`, `x0`, `v` or `edm` (F of Karras et al. 2022).
        objective: `simple` (mean squared error), `vlb` (the negative ELBO itself), `hybrid` (simple, and the
            negative ELBO for learned variances) or `continuous` (that of infinitely many steps).
        weighting: of the noise levels in `simple` and `hybrid`: `none`, `min_snr`, `p2`, `edm` or `sigmoid`.
        time_sampler: how training draws its times: `uniform`, `stratified`, `antithetic`, or `loss_aware` (more often
            where the loss has been large).
        variance: variance of the reverse steps: `beta`, exact for data from N(0, I); `beta_tilde`, exact for a single
            point; or `learned` with `hybrid` and `vlb`. By default learned with `hybrid`, else beta for continuous data
            and beta_tilde for integers.
        decoder: how integers are read from the cleanest level: a Gaussian around the network's estimate, cut into
            levels (`gaussian`), or from the noisy data alone (`level_softmax`).
        self_conditioning: the network also sees its last estimate of the data.
        spec, **shared: see `DiffusionModel`.

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
        objective: ObjectiveName = "simple",
        weighting: WeightingName = "none",
        time_sampler: Literal["uniform", "stratified", "antithetic", "loss_aware"] = "antithetic",
        variance: Literal["beta", "beta_tilde", "learned"] | None = None,
        decoder: Literal["gaussian", "level_softmax"] = "gaussian",
        self_conditioning: bool = False,
        **shared,
    ):
        super().__init__(spec, **shared)
        one_of("parameterisation", parameterisation, PARAMETERISATIONS)
        one_of("decoder", decoder, ("gaussian", "level_softmax"))
        if decoder == "level_softmax":
            if spec.levels is None:
                raise InputError(f"decoder=level_softmax is for integers, and {spec.name} is continuous: use gaussian")
            self.decoder = LevelSoftmax(spec.levels)
        variance = variance or default_variance(objective, spec.levels)
        if log_snr_ends is None:
            log_snr_ends = default_ends(schedule, self.decoder.finest_log_snr, levels=spec.levels)
        self.decide(variance=variance, log_snr_ends=log_snr_ends)
        learned = variance == "learned"
        core = Denoiser(
            self.network(learned_variance=learned, self_conditioning=self_conditioning),
            make_schedule(schedule, self.num_steps, ends=log_snr_ends, zero_terminal_snr=zero_terminal_snr),
            PARAMETERISATIONS[parameterisation](), learned_variance=learned, self_conditioning=self_conditioning,
        )
        self.assemble_denoiser(
            core, objective, variance, weighting=weighting, time_sampler=time_sampler)


class EnergyDDPM(DiffusionModel):
    """An energy-based model at every noise level of a diffusion, by denoising score matching.

        x_t = alpha_t x_0 + sigma_t eps,   E(x_t, t) = 1/2 |x_t|^2 + (alpha_t/sigma_t) sum x_t f(x_t, t),   f a U-Net
        loss = E |v - grad sum x_t f|^2 = E |eps - sigma_t grad E|^2 / alpha_t^2,   v = alpha_t eps - sigma_t x_0

    A diffusion model whose scores are gradients: samplers, guidance, edits, the ELBO and the probability flow are
    those of `DDPM`. The energies of different noise levels have unrelated constants, so that the ELBO uses scores
    alone; `partition` estimates log Z of one level through the others.

    Arguments:
        schedule: noise schedule; `cosine` is the continuous one with log-SNR in [-15, 15].
        log_snr_ends: log-SNR at t = 0 and at t = 1 of `cosine` and `linear_log_snr`; their own by default.
        weighting: of the noise levels: `none`, `min_snr`, `p2`, `edm` or `sigmoid`.
        time_sampler: how training draws its times, see `DDPM`.
        variance: variance of the reverse steps, `beta` (by default for continuous data) or `beta_tilde`.
        net: options of the network, a U-Net for images and sequences, a residual MLP for vectors; each evaluation also
            takes its gradient, at two to three times the cost of `DDPM`.
        spec, **shared: see `DiffusionModel`.

    Raises:
        InputError: for a network that cannot be differentiated twice, or activations that are recomputed.

    Source: Salimans and Ho 2021, "Should EBMs model the energy or the score?", section 3.

    Example:
        >>> spec = DataSpec("digits", (1, 8, 8), levels=17)
        >>> model = EnergyDDPM(spec, net={"channels": 8, "multipliers": [1, 2]}, num_steps=10)
        >>> model.sample(2, steps=3).x.shape
        torch.Size([2, 1, 8, 8])
        >>> model.energies(Batch(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)), log_snr=0.0).round()  # 1/2 |x|^2 so far
        tensor([16., 16.])
    """

    family = "energy_ddpm"
    tolerates_tf32 = False  # second derivatives
    needs_whole_weights = "its loss takes second derivatives, for which the weights have to be whole"

    def __init__(
        self,
        spec: DataSpec,
        *,
        schedule: Literal["cosine", "linear", "linear_continuous", "cosine_discrete", "sigmoid",
                          "linear_log_snr"] = "cosine",
        log_snr_ends: list[float] | None = None,
        weighting: WeightingName = "none",
        time_sampler: Literal["uniform", "stratified", "antithetic", "loss_aware"] = "antithetic",
        variance: Literal["beta", "beta_tilde"] | None = None,
        net: UNet | MLPDenoiser | dict | None = None,
        **shared,
    ):
        super().__init__(spec, net=net, **shared)
        network = self.network()
        if not isinstance(network, UNet | MLPDenoiser):
            raise InputError(f"model=energy_ddpm takes a U-Net or an MLP: the attention of "
                             f"{an(type(network).__name__)} can be differentiated once only")
        if network.checkpointing:
            raise InputError("model.net.checkpointing is not for model=energy_ddpm, whose scores are gradients "
                             "already: smaller batches (data.batch_size) take less memory")
        variance = variance or default_variance("simple", spec.levels)
        if log_snr_ends is None:
            log_snr_ends = default_ends(schedule, self.decoder.finest_log_snr, levels=spec.levels)
        self.decide(variance=variance, log_snr_ends=log_snr_ends)
        core = Denoiser(Potential(network), make_schedule(schedule, self.num_steps, ends=log_snr_ends), V())
        self.assemble_denoiser(
            core, "simple", variance, weighting=weighting, time_sampler=time_sampler)

    def compiled_parts(self) -> list[nn.Module]:
        """Nothing: compiled code has no second derivatives."""
        return []

    def sharded_networks(self) -> list[nn.Module]:
        """Refused, see `needs_whole_weights`."""
        return super(DiffusionModel, self).sharded_networks()

    # ---- energies -----------------------------------------------------------------------------------------------

    def level(self, log_snr: float, weights: str | float = "ema") -> NoiseLevels:
        """The energy of x_t at one noise level, in the network's units.

        Raises:
            InputError: for a level that is not on the schedule, of which the network has learned nothing.
        """
        first = torch.tensor([1.0, 1 / self.num_steps, 0.0], dtype=torch.float64)
        least, most, clean = self.core.schedule.log_snr(first).tolist()
        most = clean if math.isfinite(clean) else most  # without noise at t = 0: the first step
        if not least - _ROUNDING <= log_snr <= most + _ROUNDING:
            raise InputError(f"log_snr = {log_snr:g} is outside of the schedule, {least:g} to {most:g}")
        return NoiseLevels(self.weights(weights).net, log_snr)

    @torch.no_grad()
    def energies(self, batch: Batch, *, log_snr: float = LEVEL, weights: str | float = "ema") -> Tensor:
        """(B,) E at alpha x_0, the mean of x_t at a noise level; no noise is added.

        Only differences between items of the same class and level have a meaning: they are those of -log p.

        Arguments:
            batch: items in the data's own units.
            log_snr: the noise level.
            weights: `ema`, `raw`, or one of the decays kept.

        Raises:
            InputError: for a level that is not on the schedule, labels that do not exist or are missing, weights that
                are not kept.
        """
        if self.conditional and batch.cond is not None:
            batch = replace(batch, cond=self._labels_of(batch))
        alpha, _ = alpha_sigma(torch.tensor(log_snr, dtype=torch.float64))
        return self.level(log_snr, weights).energy(float(alpha) * self._network_input(batch), self._cond(batch))

    def _labels_of(self, batch: Batch) -> Tensor:
        """The checked classes of items; the number of classes stands for no class, if the model has learned that."""
        labels, most = batch.cond, self.num_classes - (not self.has_null_class)
        if isinstance(labels, list | tuple) and len(labels) == len(batch):
            labels = self.labels(labels, torch.arange(len(batch)))
        wrong = not isinstance(labels, Tensor) or labels.shape != (len(batch),) or labels.dtype not in _WHOLE
        if wrong or bool(((labels < 0) | (labels > most)).any()):
            raise InputError(f"cond must be {len(batch)} classes from 0 to {self.num_classes - 1}, got {batch.cond}")
        return labels

    @outside_inference()
    def partition(
        self, cond: int | str | None = None, *, log_snr: float = LEVEL, weights: str | float = "ema", seed: int = 0,
        chains: int = 512, steps: int = 100,
    ) -> LogPartition:
        """log Z of the energy of one noise level in the network's units, between two bounds.

        exp(-E)/Z is a density of noisy data: it is no likelihood of the data, which `log_likelihood` bounds.

        Arguments:
            cond: the class; None for no class, not for a model trained with cond_drop=0.
            log_snr: the noise level.
            weights: `ema`, `raw`, or one of the decays kept.
            seed: seed of the chains.
            chains: number of chains in each direction, all in one call of the network.
            steps: number of noise levels from N(0, I) to this one, and calls of the network in each direction.

        Raises:
            InputError: for a class that does not exist, several of them, weights that are not kept, a level that is not
                on the schedule or noisier than a log-SNR of -8, or fewer than two chains or steps.
        """
        at_least(2, chains=chains)
        self.require_class(cond)
        keyed = KeyedGenerator(seed, torch.arange(chains, device=self.device), "log Z")
        labels = None if cond is None else self.labels(cond, keyed.index)
        if labels is not None and bool((labels != labels[0]).any()):
            raise InputError(f"cond = {cond} names several classes: log Z is that of one, ask for each in turn")
        return DiffusionImportanceSampling(steps=steps)(
            self.level(log_snr, weights), self.spec.event_shape, keyed, chains=chains, cond=labels,
            dtype=self.location.dtype)
