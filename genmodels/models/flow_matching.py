"""Flow matching (Lipman et al. 2023; rectified flow, Liu et al. 2023): the velocity of a path from data to noise."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import Denoiser, Elbo
from genmodels.diffusion.flow_matching import Coupling, CouplingName, FlowMatching, PathName, make_path, velocity_of
from genmodels.models.base import Loss
from genmodels.models.diffusion import DiffusionModel, load_teacher
from genmodels.models.optimizer import Optimizer
from genmodels.nn import DiT, MLPDenoiser, UNet

_REFLOW_STEPS, _ROWS = 20, 256  # of Heun from noise to data, for so many pairs at once


class Pairs(NamedTuple):
    """Data and the noise that they come from, (N, *event) in the network's units, and their classes (N,) or None."""

    x0: Tensor
    noise: Tensor
    cond: Tensor | None


class FlowMatchingModel(DiffusionModel):
    """A flow from noise to data along a path, whose velocity a network learns by regression.

        x_t = alpha(t) x_0 + sigma(t) eps,    loss = E |alpha' x_0 + sigma' eps - v(x_t, t)|^2,    dx_t/dt = v(x_t, t)

    The same network is a denoiser, v, x0, eps and score being views of one prediction: samplers, guidance, inpainting,
    editing, the evidence lower bound and the likelihood by the ODE are those of `DDPM`.

    Arguments:
        spec: the data set this model is built for.
        path: `linear`, straight lines (rectified flow), `cosine`, which preserves the variance, or a noise schedule of
            `DDPM` by its name after `vp_`.
        sigma_min: noise that `linear` leaves at t = 0.
        coupling: how items are paired with noise: `independent`, or minibatch optimal transport, exact (`ot`) or
            entropic (`sinkhorn`, for batches of thousands); where the model is conditioned, for each class by itself.
        time_sampler: how training draws its times: those of `DDPM`, `logit_normal` or `cosmap`.
        reflow: a checkpoint of this family or of `DDPM`: instead of the data its own pairs of noise and the data that
            its flow leads to are learned (Liu et al. 2023), whose straighter paths need fewer steps.
        reflow_pairs: how many pairs are drawn, anew whenever training begins or is resumed; classes in turn.
        num_steps: T, the number of steps of the bound, and the most of a sampler.
        class_conditional, cond_drop, noise, net, optimizer, ema_decay: see `DDPM`.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.

    Example:
        >>> spec = DataSpec("digits", (1, 8, 8), levels=17)
        >>> model = FlowMatchingModel(spec, net={"channels": 8, "multipliers": [1, 2]})
        >>> model.sample(2, steps=3).x.shape
        torch.Size([2, 1, 8, 8])
    """

    family = "flow_matching"
    validates_by_ode = True

    def __init__(
        self,
        spec: DataSpec,
        *,
        path: PathName = "linear",
        sigma_min: float = 0.0,
        coupling: CouplingName = "independent",
        time_sampler: Literal[
            "uniform", "stratified", "antithetic", "loss_aware", "logit_normal", "cosmap"
        ] = "antithetic",
        reflow: str | None = None,
        reflow_pairs: int = 4096,
        num_steps: int = 1000,
        class_conditional: bool = True,
        cond_drop: float = 0.1,
        noise: float = 0.05,
        net: UNet | DiT | MLPDenoiser | dict | None = None,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.9999,
    ):
        super().__init__(spec)
        self.save_hyperparameters(ignore=["spec"], logger=False)
        self.prepare(num_steps=num_steps, cond_drop=cond_drop, class_conditional=class_conditional, noise=noise)
        # Along noise schedules velocities may have no bound: at SNR 0 alpha' of some is infinite.
        self.usual_sampler = "dpmpp_2m" if path.startswith("vp_") else "flow"
        followed = make_path(path, num_steps, sigma_min=sigma_min)
        core = Denoiser(self.network(net), followed, velocity_of(followed))
        objective = FlowMatching(Coupling(coupling, whole=self._whole), time_sampler=time_sampler)
        objective.check(core)
        elbo = Elbo(self.decoder, num_steps, "beta" if spec.levels is None else "beta_tilde")
        self.assemble(core, elbo, objective, optimizer, ema_decay)
        if reflow is not None and (spec.mel is not None or reflow_pairs < 1 or coupling != "independent"):
            raise InputError("reflow is for vectors and images, with reflow_pairs of at least 1 and no coupling: its "
                             "pairs are given")
        self.reflow, self.reflow_pairs = reflow, reflow_pairs
        self.pairs: Pairs | None = None

    def _whole(self, rows: Tensor) -> tuple[Tensor, slice]:
        """The rows of all processes in the order of the global batch, and which of them are those of this one."""
        rank, world = self._rank_world
        if world == 1:
            return rows, slice(None)
        return self.all_gather(rows).transpose(0, 1).flatten(0, 1), slice(rank, None, world)

    # ---- reflow -------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """The squared error of the velocity at one time per example: on the batch, or on as many pairs of `reflow`."""
        if self.reflow is None:
            return super().loss(batch, generator)
        if self.pairs is None:
            self.pairs = self._drawn()
        rows = (generator.child("pairs").uniform((len(batch),), device=self.device) * len(self.pairs.x0)).long()
        x0, noise, cond = (None if part is None else part[rows] for part in self.pairs)
        objective = FlowMatching(lambda *_: noise, time_sampler=self.objective.time_sampler)
        out = objective(self.core, x0, self._hidden(cond, generator), generator, *self._rank_world)
        objective.observe(out)
        return Loss(out.value, out.per_example, out.parts, out.times)

    @torch.no_grad()
    def _drawn(self) -> Pairs:
        """The pairs of the checkpoint, in this network's units: the same ones for one seed."""
        teacher = load_teacher(self, "reflow", self.reflow)
        index = torch.arange(self.reflow_pairs, device=self.device)
        noise = KeyedGenerator(self.seed, index, "reflow").normal((len(index), *self.spec.event_shape))
        cond = teacher.labels(None, index)
        found = [teacher.follow(noise[part], None if cond is None else cond[part], steps=_REFLOW_STEPS)
                 for part in index.split(_ROWS)]
        x0 = torch.cat(found)
        if self.spec.levels is None:
            x0 = self.encode(x0 * teacher.scale + teacher.location)
        return Pairs(x0, noise.to(x0), cond if self.conditional else None)
