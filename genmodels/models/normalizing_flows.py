"""Normalizing flows: RealNVP, Glow, NSF, MAF, Jet and TarFlow."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, check_number, one_of, only_for
from genmodels.core.likelihood import Likelihood
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import Samples, SamplingOptions
from genmodels.flows.coupling_flows import LAYOUT, jet, realnvp_image, realnvp_vector
from genmodels.flows.dequantize import GaussianNoise
from genmodels.flows.discrete import ContinuousFlow, DiscreteFlow, NoisyFlow
from genmodels.flows.elementwise import ScaleKind
from genmodels.flows.flow import Flow
from genmodels.flows.multiscale import default_levels, glow
from genmodels.flows.spline import neural_spline
from genmodels.flows.tarflow import Decoding, decoding, tarflow
from genmodels.models.base import Loss
from genmodels.models.flow import FlowModel
from genmodels.nn.attention_block import AttentionKind


class RealNVP(FlowModel):
    """RealNVP: affine couplings of alternating parts, for vectors and images.

        z_1 = x_1,   z_2 = exp(h) x_2 + t,   h = a tanh(s) + b,   (s, t) = net(x_1)
        scale = plain:   z_2 = s x_2 + t,   |det| = prod |s|,   |s| >= 2^-10

    Arguments:
        couplings: number of couplings, for vectors.
        layout: parts for images, in order: `checkerboard*n` and `channel*n` couplings, `squeeze` and `split`.
        hidden: width of the coupling networks, one for all or (images) one for each group of couplings; null for 256
            (vectors) or 64 (images).
        depth: hidden layers (vectors) or residual blocks (images) of the networks; null for 2 or 8.
        net: kind of coupling network, for images.
        scale: form of the couplings' scale; `tied` is h = e^f tanh(s e^-f), `plain` a scale s of either sign.
        actnorm: whether activation normalisation follows every coupling, for images.
        dropout: probability of dropping a hidden value; gated networks have none.
        attention: attention block in the coupling networks for images, `none` for none.
        heads: heads of that block.
        spec, **shared: see `FlowModel`.

    Example:
        >>> model = RealNVP(DataSpec("points", (2,)), hidden=16, ema_decay=0)
        >>> model.family
        'realnvp'
    """

    family = "realnvp"

    def __init__(
        self,
        spec: DataSpec,
        *,
        couplings: int = 8,
        layout: list[str] | tuple[str, ...] = LAYOUT,
        hidden: int | list[int] | None = None,
        depth: int | None = None,
        net: Literal["residual", "gated"] = "residual",
        scale: ScaleKind = "tanh",
        actnorm: bool = True,
        dropout: float = 0.0,
        attention: AttentionKind = "none",
        heads: int = 4,
        **shared,
    ):
        super().__init__(spec, **shared)
        shape = spec.event_shape
        common = {"dropout": dropout, "cond": self.condition, "memory": self.memory}
        usual_hidden, usual_depth = (256, 2) if len(shape) == 1 else (64, 8)
        hidden, depth = usual_hidden if hidden is None else hidden, usual_depth if depth is None else depth
        self.decide(hidden=hidden, depth=depth)
        if len(shape) == 1:
            if isinstance(hidden, list):
                raise ValueError("hidden: vectors have one width for all networks, lists are for images")
            only_for("images", layout=(tuple(layout), LAYOUT), net=(net, "residual"), actnorm=(actnorm, True),
                     attention=(attention, "none"), heads=(heads, 4))
            flow = realnvp_vector(shape[0], couplings=couplings, hidden=hidden, depth=depth, scale=scale, **common)
        elif len(shape) == 3:
            only_for("vectors, and layout= for images", couplings=(couplings, 8))
            flow = realnvp_image(shape, layout=layout, hidden=hidden, depth=depth, net=net, scale=scale,
                                 actnorm=actnorm, attention=attention, heads=heads, **common)
        else:
            raise ValueError(f"realnvp takes vectors and images, not events of shape {shape}: use model=glow")
        self.assemble(flow)


class Glow(FlowModel):
    """Glow: actnorm, 1x1 convolutions and couplings over several scales, for images and sequences.

        level = squeeze, K x [actnorm, 1x1, coupling], factor out half of the channels

    Arguments:
        levels: number of scales L; null for the most that fit, up to three.
        steps: steps K of each level.
        hidden: width of the coupling networks.
        coupling: element-wise transform of the couplings.
        scale: form of an affine coupling's scale: bounded (`tanh`), or the published `sigmoid`.
        linear: parameterisation of the 1x1 convolutions.
        learned_prior: whether factored-out channels are standardised by a network of the remaining ones.
        attention: attention block in the coupling networks, `none` for none.
        heads: heads of that block.
        spec, **shared: see `FlowModel`.

    Example:
        >>> import torch
        >>> from genmodels.core.data import Batch
        >>> model = Glow(DataSpec("digits", (1, 8, 8), levels=17), steps=2, hidden=8)
        >>> model.initialize(Batch(torch.randint(0, 17, (32, 1, 8, 8), dtype=torch.uint8)))
        >>> model.sample(2, temperature=0.7).x.shape
        torch.Size([2, 1, 8, 8])
    """

    family = "glow"

    def __init__(
        self,
        spec: DataSpec,
        *,
        levels: int | None = None,
        steps: int = 16,
        hidden: int = 128,
        coupling: Literal["affine", "additive", "mixture", "spline"] = "affine",
        scale: Literal["tanh", "sigmoid"] = "tanh",
        linear: Literal["lu", "full", "householder"] = "lu",
        learned_prior: bool = True,
        attention: AttentionKind = "none",
        heads: int = 4,
        **shared,
    ):
        super().__init__(spec, **shared)
        self.assemble(glow(
            spec.event_shape, levels=levels, steps=steps, hidden=hidden, coupling=coupling, scale=scale, linear=linear,
            learned_prior=learned_prior, attention=attention, heads=heads, cond=self.condition, memory=self.memory,
        ))
        self.decide(levels=max(1, default_levels(spec.event_shape)) if levels is None else levels)


class NSF(FlowModel):
    """A neural spline flow: monotone rational-quadratic splines, in couplings or autoregressive, for vectors.

    Images are flattened to vectors of pixels, and the networks ignore their geometry.

        z_2 = spline(x_2; net(x_1)),   or   z_i = spline(x_i; net(x_1 .. x_{i-1}))

    Arguments:
        layers: number of couplings or autoregressive layers.
        kind: `coupling` (one pass in both directions) or `autoregressive` (D passes to sample).
        transform: `spline`, or `affine`; affine and autoregressive is MAF.
        bins: bins K of a spline.
        bound: splines act on [-bound, bound] and are the identity outside.
        hidden: width of the networks.
        depth: hidden layers, or residual blocks of two layers each with `residual`.
        residual: residual networks.
        mix: map before every layer: `none`, a learned linear map (`lu`), or `actnorm`.
        spec, **shared: see `FlowModel`.

    Example:
        >>> NSF(DataSpec("points", (2,)), layers=2, bins=4).family
        'nsf'
    """

    family = "nsf"

    def __init__(
        self,
        spec: DataSpec,
        *,
        layers: int = 8,
        kind: Literal["coupling", "autoregressive"] = "coupling",
        transform: Literal["spline", "affine"] = "spline",
        bins: int = 16,
        bound: float = 5.0,
        hidden: int = 64,
        depth: int = 2,
        residual: bool = False,
        mix: Literal["none", "lu", "actnorm"] = "none",
        **shared,
    ):
        super().__init__(spec, **shared)
        if transform == "affine":
            only_for("transform=spline", bins=(bins, 16), bound=(bound, 5.0))
        self.assemble_flat(neural_spline(
            spec.dims, layers=layers, kind=kind, transform=transform, bins=bins, bound=bound, hidden=hidden,
            depth=depth, residual=residual, mix=mix, cond=self.condition, memory=self.memory,
        ))


class MAF(FlowModel):
    """A masked autoregressive flow: every number standardised by networks of those before it, for vectors.

    Images are flattened to vectors of pixels, row by row.

        z_i = (x_i - m_i(x_1 .. x_{i-1})) exp(-alpha_i(x_1 .. x_{i-1}))

    The density takes one pass. A sample takes D passes, one after another, which together have the arithmetic of one.

    Arguments:
        layers: number of layers, the order reversed from one to the next.
        hidden: width of the networks.
        depth: hidden layers, or residual blocks of two layers each with `residual`.
        residual: residual networks.
        mix: map before every layer: `none`, a learned linear map (`lu`), or `actnorm`.
        spec, **shared: see `FlowModel`.

    Example:
        >>> MAF(DataSpec("points", (2,)), layers=2).family
        'maf'
    """

    family = "maf"

    def __init__(
        self,
        spec: DataSpec,
        *,
        layers: int = 8,
        hidden: int = 64,
        depth: int = 2,
        residual: bool = False,
        mix: Literal["none", "lu", "actnorm"] = "actnorm",
        **shared,
    ):
        super().__init__(spec, **shared)
        self.assemble_flat(neural_spline(
            spec.dims, layers=layers, kind="autoregressive", transform="affine", hidden=hidden, depth=depth,
            residual=residual, mix=mix, cond=self.condition, memory=self.memory,
        ))


class Jet(FlowModel):
    """A flow of affine couplings between the channels and between the positions of patches, for images.

        z_1 = x_1,   z_2 = (x_2 + t) 2 sigmoid(s),   (s, t) = transformer(x_1)

    Density and sample take one pass each.

    Arguments:
        patch: positions along every side of a patch.
        couplings: number of couplings of each level.
        spatial: every `spatial`-th coupling is between positions instead of channels; 0 for none.
        levels: number of scales; after each but the last, half of the channels are factored out.
        width: width of the tokens.
        depth: layers of each network.
        heads: heads of each attention.
        expansion: hidden width of the perceptrons over the width of the tokens.
        attention: kind of attention, an entry of `ATTENTION`.
        places: add a learned vector to each token.
        spec, **shared: see `FlowModel`.

    Example:
        >>> Jet(DataSpec("digits", (1, 8, 8), levels=17), couplings=2, width=16, depth=1, heads=2).family
        'jet'
    """

    family = "jet"

    def __init__(
        self,
        spec: DataSpec,
        *,
        patch: int = 2,
        couplings: int = 16,
        spatial: int = 2,
        levels: int = 1,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        expansion: int = 4,
        attention: AttentionKind = "rope2d",
        places: bool = True,
        **shared,
    ):
        super().__init__(spec, **shared)
        self.assemble(jet(
            spec.event_shape, patch=patch, couplings=couplings, spatial=spatial, levels=levels, width=width,
            depth=depth, heads=heads, expansion=expansion, attention=attention, places=places,
            cond=self.condition, memory=self.memory,
        ))  # fmt: skip


#: The values of `sampler=`: tokens that are solved together (None for all), and the tolerance of their iteration.
SAMPLERS = {
    "sequential": Decoding(),
    "gauss_seidel": Decoding(tokens=16, tolerance=1e-4),
    "jacobi": Decoding(tokens=None, tolerance=1e-4),
}


class TarFlow(FlowModel):
    """A flow of causal transformers over patches, in alternating order.

        z_i = (x_i - m_i) e^-a_i,   (m, a)_i = net_k(x_1 .. x_{i-1}),   k = 1 .. blocks;   log |det| = -sum a

    Trained on dequantised integers it gives a bound on their likelihood. With `augment` it is trained on data with
    Gaussian noise instead, and its samples are denoised by its score; then it has a density of noisy data only, and no
    likelihood is reported. A density takes one pass, a sample one step for each token of each block, or a few sweeps
    over all tokens (`sampler=jacobi`).

    Arguments:
        patch: positions along every side of a patch; frames of a token, for sequences. None for 2 and 1.
        blocks: number of meta-blocks.
        width: width of the tokens.
        depth: layers of each meta-block.
        heads: heads of each attention.
        expansion: hidden width of the perceptrons over the width of the tokens.
        attention: kind of attention along the tokens, one with a causal form.
        places: add a learned vector to each token; sequences have none.
        transform: map of every number, `affine` as above, or `mixture` of logistics (Flow++), better for likelihoods of
            data with modes and slower to invert.
        components: number of components of a mixture.
        patches: squares of neighbours (`near`), or pixels far apart (`far`), for images.
        order: of the tokens of an image: `rows`, `rows_columns` in turn, or `random`, one for each pair of meta-blocks.
        dropout: probability of dropping a value of a residual branch.
        cond_drop: probability that training hides the class, which guidance needs; 0 for never.
        augment: standard deviation of the noise, for data in [-1, 1], in place of any dequantisation; 0 for none.
        spec, **shared: see `FlowModel`.

    Example:
        >>> model = TarFlow(DataSpec("digits", (1, 8, 8), levels=17), blocks=2, width=16, depth=1, heads=2)
        >>> model.initialize(Batch(torch.randint(0, 17, (16, 1, 8, 8), dtype=torch.uint8)))
        >>> model.sample(2).x.shape
        torch.Size([2, 1, 8, 8])
    """

    family = "tarflow"
    principal = True  # given other tokens, the numbers of a token are modelled as independent
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
        order: Literal["rows", "rows_columns", "random"] = "rows",
        dropout: float = 0.0,
        cond_drop: float = 0.1,
        augment: float = 0.0,
        **shared,
    ):
        super().__init__(spec, **shared)
        self.condition_on_class(self.conditional, cond_drop)
        check_number("augment", augment, 0)
        if cond_drop not in (0, 0.1) and not self.conditional:
            raise ValueError(f"cond_drop={cond_drop} hides classes, which this model does not take: give "
                             "class_conditional=true")
        if self.base == "class" and cond_drop:
            raise ValueError("base=class has no density without a class: give cond_drop=0")
        if augment and (spec.levels is None or self.preprocess != "centre"):
            raise ValueError(f"augment={augment} is for integers with model.preprocess=centre: noise leaves the range "
                             "in which a logit is defined")
        if augment and self.dequantisation == "variational":
            raise ValueError(f"augment={augment} takes the place of dequantisation=variational: leave one of them out")
        if transform != "mixture":
            only_for("transform=mixture", components=(components, 8))
        self.augment = augment
        patch = (2 if len(spec.event_shape) == 3 else 1) if patch is None else patch
        self.decide(patch=patch)
        self.assemble(tarflow(
            spec.event_shape, patch=patch, blocks=blocks, width=width, depth=depth, heads=heads, expansion=expansion,
            attention=attention, places=places, transform=transform, components=components, patches=patches,
            order=order, dropout=dropout, cond=self.condition, null_class=self.has_null_class, memory=self.memory,
        ))  # fmt: skip

    def around(self, flow: Flow) -> ContinuousFlow | DiscreteFlow:
        """The flow with dequantisation, or with the noise of `augment`, halved since the data fill [0, 1] here."""
        if not self.augment:
            return super().around(flow)
        return NoisyFlow(GaussianNoise(self.spec.levels, self.augment / 2), flow)

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """As for every flow, with some classes hidden; with `augment` nats per value of noisy data."""
        loss = super().loss(replace(batch, cond=self._hidden(self._cond(batch), generator)), generator)
        if not self.augment:
            return loss
        nats = math.log(2) * loss.per_example
        return Loss(nats.mean(), nats)

    def log_likelihood(
        self, batch: Batch, *, weights: str | float = "ema", seed: int = 0, importance_samples: int = 1,
        rows: int | None = None,
    ) -> Likelihood:
        """See `FlowModel.log_likelihood`; none with `augment`, which gives a density of noisy data only."""
        if not self.augment:
            return super().log_likelihood(batch, weights=weights, seed=seed, importance_samples=importance_samples,
                                          rows=rows)
        return self.no_likelihood(batch, f"its density is that of data with noise of {self.augment}", weights)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The likelihood of the batch; with `augment` the log-density of noisy data, with noise keyed by item."""
        super().validation_step(batch, batch_idx)
        if self.augment:
            noise = KeyedGenerator(self.seed, batch.item_index, "validate")
            with torch.no_grad():
                nats, _ = self.weights().log_prob(batch.x, self._cond(batch), batch.mask, generator=noise)
            self._pending[-1] = replace(self._pending[-1], nats=nats.double().cpu())

    def log_validation(self, result: Likelihood) -> None:
        """As for every flow; with `augment` nats per value of noisy data, by which checkpoints are chosen."""
        if not self.augment:
            super().log_validation(result)
            return
        value = result.mean_nll_per_dim()
        self.log("val/noisy_nll_per_dim", float("nan") if value is None else value, rank_zero_only=False)
        if value is not None:
            self.figures["val/noisy_nll_per_dim"] = value
        self.validated = replace(result, kind="exact")  # of data with noise, as the metric's name says

    def draw(self, options: SamplingOptions) -> Samples:
        """Samples by the inverse, `sequential` (exact), `gauss_seidel` (16 tokens together) or `jacobi` (all together).

        The latter two iterate until no value changes by more than 0.0001; the default is sequential. `guidance` needs a
        class-conditional model.
        """
        options = options.with_default(sampler="sequential")
        one_of("sampler", options.sampler, SAMPLERS)
        if options.guidance != 1 and not self.has_null_class:
            raise InputError("guidance needs a model that was trained with model.class_conditional=true and "
                             "model.cond_drop above 0")
        method = replace(SAMPLERS[options.sampler], guidance=options.guidance)
        labels = self.labels(options.cond, self.numbered(options.n, options.start))
        if options.guidance == 0:  # no class at all, in the denoising of noisy samples too
            method, labels = replace(method, guidance=1.0), torch.full_like(labels, self.num_classes)
        with decoding(self.weights(options.weights), method) as blocks:
            samples = self._sample(options, labels)
            samples.made.update(sampler=options.sampler, evaluations=sum(block.sweeps for block in blocks))
        samples.made.update({"guidance": options.guidance} if options.guidance != 1 else {})
        return samples if options.guidance else replace(samples, cond=None)
