"""Generation in one to four steps: networks that lead along the flow from noise to data in long steps."""

from __future__ import annotations

from typing import Literal

from genmodels.core.data import DataSpec
from genmodels.diffusion import Elbo, FlowMap
from genmodels.diffusion.mean_flow import MeanFlow
from genmodels.diffusion.shortcut import FlowMapMatching, Shortcut
from genmodels.models.diffusion import DiffusionModel
from genmodels.models.optimizer import Optimizer
from genmodels.nn import DiT, MLPDenoiser, UNet

TimesName = Literal["uniform", "stratified", "antithetic", "logit_normal", "cosmap"]


class FlowMapModel(DiffusionModel):
    """A flow map along the straight path, x_s = x_t - (t - s) u(x_t, t, s); a family writes its options and objective.

    For s = t it contains a velocity, so that the bound and the likelihood by the ODE are those of flow matching. They
    belong to the samples that many steps of this velocity make, not to those of a few long steps.
    """

    usual_sampler = "flow_map"
    #: What `sweeps=[steps]` of an evaluation compares.
    swept_steps = (1, 2, 4, 20)

    def assemble_map(
        self, objective: FlowMapMatching, net: UNet | DiT | MLPDenoiser | dict | None,
        optimizer: Optimizer | dict | None, ema_decay: float | list[float],
    ) -> None:
        """Called last in a family's constructor, after `prepare`."""
        core = FlowMap(self.network(net, two_times=True))
        objective.check(core)
        elbo = Elbo(self.decoder, self.num_steps, "beta" if self.spec.levels is None else "beta_tilde")
        self.assemble(core, elbo, objective, optimizer, ema_decay)


class ShortcutModel(FlowMapModel):
    """A shortcut model (Frans et al. 2025): flow matching, and steps that do what two of half their length do.

        u(x_t, t, t) learns eps - x_0,    u(x_t, t, t - 2d) learns the mean of two steps of length d = 1/2, 1/4, ..

    Arguments:
        spec: the data set this model is built for.
        share: probability that an item learns a step rather than the velocity.
        finest: number M of shortest steps from noise to data, a power of two; a step of 1/M is the velocity itself.
        time_sampler: how training draws its times, see `FlowMatchingModel`.
        num_steps: T, the number of steps of the bound, and the most of a sampler.
        class_conditional, cond_drop, noise, net, optimizer, ema_decay: see `DDPM`; the network takes two times.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.

    Example:
        >>> spec = DataSpec("digits", (1, 8, 8), levels=17)
        >>> model = ShortcutModel(spec, net={"channels": 8, "multipliers": [1, 2]})
        >>> model.sample(2, steps=1).made["evaluations"]
        1
    """

    family = "shortcut"

    def __init__(
        self,
        spec: DataSpec,
        *,
        share: float = 0.25,
        finest: int = 128,
        time_sampler: TimesName = "antithetic",
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
        self.assemble_map(Shortcut(share=share, finest=finest, time_sampler=time_sampler), net, optimizer, ema_decay)


class MeanFlowModel(FlowMapModel):
    """A mean flow (Geng et al. 2025): one network of the mean velocity between any two times of the flow.

        u(x_t, t, s) learns v - (t - s) d/dt u(x_t, t, s),    v = eps - x_0,    x_0 = x_1 - u(x_1, 1, 0)

    Arguments:
        spec: the data set this model is built for.
        share: probability that an item learns between two times, and not the velocity at one.
        mean, std: of the logits of the times.
        power: how much large errors count for less, see `MeanFlow`: 0 for the mean squared error, 1 for its logarithm.
        num_steps: T, the number of steps of the bound, and the most of a sampler.
        class_conditional, cond_drop, noise, net, optimizer, ema_decay: see `DDPM`; the network takes two times.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.

    Example:
        >>> spec = DataSpec("digits", (1, 8, 8), levels=17)
        >>> model = MeanFlowModel(spec, net={"channels": 8, "multipliers": [1, 2]})
        >>> model.sample(2, steps=1).made["evaluations"]
        1
    """

    family = "mean_flow"

    def __init__(
        self,
        spec: DataSpec,
        *,
        share: float = 0.25,
        mean: float = -0.4,
        std: float = 1.0,
        power: float = 1.0,
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
        self.assemble_map(MeanFlow(share=share, mean=mean, std=std, power=power), net, optimizer, ema_decay)
