"""TarFlow (Zhai et al. 2024) as a model: for likelihoods of dequantised data, or for samples of noisy ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, one_of
from genmodels.core.likelihood import Likelihood
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import Samples, SamplingOptions
from genmodels.flows.dequantize import GaussianNoise
from genmodels.flows.discrete import ContinuousFlow, DiscreteFlow, NoisyFlow
from genmodels.flows.flow import Flow
from genmodels.flows.tarflow import Decoding, decoding, tarflow
from genmodels.models.base import Loss
from genmodels.models.flow import FlowModel
from genmodels.nn.attention_block import AttentionKind

#: What `sampler=` may be: tokens found together (None for all), and where their iteration stops.
SAMPLERS = {
    "sequential": Decoding(),
    "gauss_seidel": Decoding(tokens=16, tolerance=1e-3),
    "jacobi": Decoding(tokens=None, tolerance=1e-3),
}


class TarFlow(FlowModel):
    """A flow of causal transformers over patches, each reading in the order opposite to the last.

        z_i = (x_i - m_i) e^-a_i,   (m, a)_i = net_k(x_1 .. x_{i-1}),   k = 1 .. blocks;   log |det| = -sum a

    It has two uses that exclude one another. Trained on dequantised integers it states a bound on their likelihood.
    With `augment` it is trained on data with Gaussian noise, and its samples are denoised by its own score; then it
    has a density of noisy data only, and no likelihood is reported. A density takes one pass, a sample one step for
    each token of each block, or a few sweeps over all tokens (`sampler=jacobi`).

    Arguments:
        spec: the data set this model is built for.
        patch: positions along every side of a patch; frames of a token, for sequences. None for 2 and 1.
        blocks: number of meta-blocks.
        width: width of the tokens.
        depth: layers of each meta-block.
        heads: heads of each attention.
        expansion: hidden width of the perceptrons over the width of the tokens.
        attention: kind of attention along the tokens, one with a causal form.
        places: whether a learned vector for each place is added; sequences have none.
        transform: map of every number, `affine` as above, or `mixture` of logistics (Flow++), better for likelihoods of
            data with modes and slower to invert.
        components: of a mixture.
        patches: squares of neighbours (`near`), or pixels far apart (`far`), for images.
        dropout: probability of dropping a value of a branch.
        cond_drop: probability that training hides the class, which guidance needs; 0 for never.
        augment: standard deviation of the noise for the second use, on the scale on which the data fill [-1, 1]; 0 for
            the first use.
        **shared: what all flows take, see `FlowModel`.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.

    Example:
        >>> model = TarFlow(DataSpec("digits", (1, 8, 8), levels=17), blocks=2, width=16, depth=1, heads=2)
        >>> model.initialize(Batch(torch.randint(0, 17, (16, 1, 8, 8), dtype=torch.uint8)))
        >>> model.sample(2).x.shape
        torch.Size([2, 1, 8, 8])
    """

    family = "tarflow"
    sampling_options = ("lengths", "sampler", "guidance")

    def __init__(
        self,
        spec: DataSpec,
        *,
        patch: int | None = None,
        blocks: int = 6,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        expansion: int = 4,
        attention: AttentionKind = "rope",
        places: bool = True,
        transform: Literal["affine", "mixture"] = "affine",
        components: int = 8,
        patches: Literal["near", "far"] = "near",
        dropout: float = 0.0,
        cond_drop: float = 0.1,
        augment: float = 0.0,
        **shared,
    ):
        super().__init__(spec, **shared)
        if not 0 <= cond_drop < 1:
            raise ValueError(f"cond_drop is a probability below 1, got {cond_drop}")
        if not augment >= 0:
            raise ValueError(f"augment is a standard deviation, 0 or more, got {augment}")
        if augment and (spec.levels is None or self.preprocess != "centre"):
            raise ValueError(f"augment={augment} is for integers with model.preprocess=centre: noise leaves the range "
                             "in which a logit is defined")
        self.cond_drop, self.augment = cond_drop, augment
        patch = (2 if len(spec.event_shape) == 3 else 1) if patch is None else patch
        self.decide(patch=patch)
        self.assemble(tarflow(
            spec.event_shape, patch=patch, blocks=blocks, width=width, depth=depth, heads=heads, expansion=expansion,
            attention=attention, places=places, transform=transform, components=components, patches=patches,
            dropout=dropout, cond=self.condition, memory=self.memory,
        ))  # fmt: skip

    def around(self, flow: Flow) -> ContinuousFlow | DiscreteFlow:
        """The flow with dequantisation, or with the noise of `augment`, of half the size where the data fill [0, 1]."""
        return NoisyFlow(GaussianNoise(self.spec.levels, self.augment / 2), flow) if self.augment else (
            super().around(flow))

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """As of every flow, with some of the classes hidden; of noisy data their negative log-density per value."""
        if self.conditional and self.cond_drop:
            hidden = generator.child("condition").uniform((len(batch.cond),), device=batch.cond.device) < self.cond_drop
            batch = replace(batch, cond=torch.where(hidden, self.num_classes, batch.cond))
        return super().loss(batch, generator)

    def log_likelihood(
        self, batch: Batch, *, weights: str | float = "ema", seed: int = 0, importance_samples: int = 1,
        rows: int = 1024,
    ) -> Likelihood:
        """See `FlowModel.log_likelihood`; with `augment` none, for a density of noisy data is none of the data.

        Arguments:
            batch, weights, seed, importance_samples, rows: see `FlowModel.log_likelihood`.
        """
        if not self.augment:
            return super().log_likelihood(batch, weights=weights, seed=seed, importance_samples=importance_samples,
                                          rows=rows)
        made = {"estimate": "none", "reason": f"its density is that of data with noise of {self.augment}",
                "weights": str(weights)}
        nats = torch.full((len(batch),), float("nan"), dtype=torch.float64, device=batch.x.device)
        return Likelihood(nats, "unnormalised", self.spec.dims, self.spec.levels, None, made, batch.item_index)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The likelihood of the batch; with `augment` the negative log-density of noisy data, keyed by item."""
        super().validation_step(batch, batch_idx)
        if self.augment:
            noise = KeyedGenerator(self.seed, batch.item_index, "validate")
            with torch.no_grad():
                nats, _ = self.weights().log_prob(batch.x, self._cond(batch), generator=noise)
            self._pending[-1] = replace(self._pending[-1], nats=nats.double().cpu())

    def log_validation(self, result: Likelihood) -> None:
        """As of every flow; with `augment` nats per value of noisy data, by which checkpoints are chosen."""
        if not self.augment:
            super().log_validation(result)
            return
        value = -float(result.nats.mean()) / self.spec.dims
        self.log("val/noisy_nll_per_dim", value, rank_zero_only=False)
        self.figures["val/noisy_nll_per_dim"] = value

    def draw(self, options: SamplingOptions) -> Samples:
        """Samples by the inverse, `sequential` (exact), `gauss_seidel` (16 tokens together) or `jacobi` (all together).

        The latter two iterate until no value moves by more than 0.001; the default is sequential. `guidance` needs a
        model of classes.
        """
        options = options.with_default(sampler="sequential")
        one_of("sampler", options.sampler, SAMPLERS)
        if options.guidance != 1 and not (self.conditional and self.cond_drop):
            raise InputError("guidance needs a model that was trained with model.class_conditional=true and "
                             "model.cond_drop above 0")
        how = replace(SAMPLERS[options.sampler], guidance=options.guidance)
        with decoding(self.weights(options.weights), how) as blocks:
            found = super().draw(options)
            found.made.update(sampler=options.sampler, evaluations=sum(block.sweeps for block in blocks))
        found.made.update({"guidance": options.guidance} if options.guidance != 1 else {})
        return found
