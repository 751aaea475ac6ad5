"""One list of instances of every bijection, for the checks that all of them pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from genmodels.flows.bijection import Bijection, Freeze, Inverse
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Checkerboard, Coupling, MaskedAutoregressive, TokenSplit
from genmodels.flows.coupling_flows import ShiftScale, TokenNet, dequantisation_flow, jet, realnvp_image, realnvp_vector
from genmodels.flows.elementwise import Additive, Affine, ElementTransform, LogisticMixture, MeanScale
from genmodels.flows.linear import Flip, GroupedLinear, InvertibleLinear, Permute, Whitening
from genmodels.flows.multiscale import FactorOut, MultiScale, glow
from genmodels.flows.scaling import ActNorm, Logit, Scale, Shift, Standardise
from genmodels.flows.spline import RationalQuadraticSpline, neural_spline
from genmodels.flows.squeeze import Flatten, Squeeze1d, Squeeze2d
from genmodels.flows.tarflow import MetaBlock, tarflow
from genmodels.nn.condition import Condition
from genmodels.nn.coupling_networks import ConvNet, GatedConvNet, ResidualConvNet, WaveNet
from genmodels.nn.perceptron import MADE, MLP, ResidualMLP

TINY = {"width": 8, "depth": 1, "heads": 2}
LABELS, VECTOR, MAP = Condition("labels", 4), Condition("vector", 2), Condition("map", 2)


@dataclass(frozen=True)
class Instance:
    """A bijection of the table.

    Arguments:
        make: makes it.
        shape: an event shape it takes.
        cond: what it is conditioned on.
        identity: whether it starts as the identity.
        options: further options of `check_bijection`.
    """

    make: Callable[[], Bijection]
    shape: tuple[int, ...]
    cond: Condition | None = None
    identity: bool = False
    options: dict = field(default_factory=dict)

    def conditions(self) -> Tensor | None:
        """Unlike conditions for three rows."""
        if self.cond is None:
            return None
        if self.cond.kind == "labels":
            return torch.tensor([0, 3, 1])
        space = tuple(self.cond.stride * n for n in self.shape[1:]) if self.cond.kind == "map" else ()
        generator = torch.Generator().manual_seed(7)
        return torch.randn(3, self.cond.size, *space, generator=generator)


def vector_coupling(features: int, element: Callable[[int], ElementTransform], *, swap: bool = False, net=MLP,
                    cond: Condition | None = None, **options) -> Coupling:  # fmt: skip
    """A coupling of the halves of a vector."""
    split = ChannelSplit(features, swap=swap)
    transform = element(split.changed)
    out = transform.params_per_dim * split.changed
    return Coupling(split, transform, net(split.kept, out, hidden=8, depth=1, cond=cond, **options))


def channel_coupling(channels: int, element: Callable[[int], ElementTransform], net=ConvNet, *,
                     cond: Condition | None = None, **options) -> Coupling:  # fmt: skip
    """A coupling of channels of an image or a sequence."""
    split = ChannelSplit(channels)
    transform = element(split.changed)
    out = transform.params_per_dim * split.changed
    return Coupling(split, transform, net(split.kept, out, hidden=8, depth=1, cond=cond, **options))


def checkerboard_coupling(channels: int, parity: int, element: Callable[[int], ElementTransform], net=ConvNet,
                          **options) -> Coupling:  # fmt: skip
    """A coupling of pixels."""
    transform = element(channels)
    out = transform.params_per_dim * channels
    return Coupling(Checkerboard(channels, parity=parity), transform, net(channels, out, hidden=8, depth=1, **options))


def autoregressive(features: int, transform: ElementTransform, **options) -> MaskedAutoregressive:
    """A masked autoregressive layer."""
    return MaskedAutoregressive(features, transform, MADE(features, transform.params_per_dim, hidden=16, **options))


def spline(_changed: int) -> RationalQuadraticSpline:
    """A small spline."""
    return RationalQuadraticSpline(bins=4)


def mixture(changed: int) -> LogisticMixture:
    """A small mixture."""
    return LogisticMixture(changed, components=3)


def token_coupling(kind: str, parity: int, cond: Condition | None = None) -> Coupling:
    """A coupling of the positions of maps of two channels."""
    return Coupling(TokenSplit(2, kind, parity=parity), ShiftScale(), TokenNet(2, 4, cond=cond, **TINY))


def prior(channels: int, dims: int = 2, cond: Condition | None = None) -> ConvNet:
    """The network of a factor-out."""
    return ConvNet(channels // 2, channels, depth=0, dims=dims, cond=cond)


def sequence_flow(memory: str = "store") -> MultiScale:
    """Two scales over mel-like sequences."""
    def stage(channels: int, shape: tuple) -> Compose:
        coupling = channel_coupling(2 * channels, Affine, WaveNet, kernel_size=3)
        layers = [Squeeze1d(), ActNorm(2 * channels), GroupedLinear(2 * channels, groups=4), coupling]
        return Compose(layers, shape, memory=memory)

    return MultiScale([stage(4, (4, None)), stage(4, (4, None))], [FactorOut(8, prior(8, 1))], (4, None))


IMAGE, SEQUENCE, VECTOR_5, PLANE = (4, 4, 4), (4, 8), (5,), (2,)

INSTANCES: dict[str, Instance] = {
    # Data-dependent scales.
    "actnorm-vector": Instance(lambda: ActNorm(5), VECTOR_5, identity=True),
    "actnorm-image": Instance(lambda: ActNorm(4), IMAGE, identity=True),
    "actnorm-sequence": Instance(lambda: ActNorm(4), SEQUENCE, identity=True),
    "actnorm-single": Instance(lambda: ActNorm(1), (1,), identity=True),
    "actnorm-plane": Instance(lambda: ActNorm(2), PLANE, identity=True),
    "standardise-vector": Instance(lambda: Standardise(VECTOR_5), VECTOR_5, identity=True),
    "standardise-image": Instance(lambda: Standardise(IMAGE), IMAGE, identity=True),
    "standardise-open-sequence": Instance(lambda: Standardise((4, None)), SEQUENCE, identity=True),
    # Linear maps.
    "lu-vector": Instance(lambda: InvertibleLinear(5), VECTOR_5),
    "lu-image": Instance(lambda: InvertibleLinear(4), IMAGE),
    "lu-sequence": Instance(lambda: InvertibleLinear(4), SEQUENCE),
    "lu-single": Instance(lambda: InvertibleLinear(1), (1,)),
    "whitening-vector": Instance(lambda: Whitening(5), VECTOR_5, identity=True),
    "whitening-image": Instance(lambda: Whitening(4, principal=True), IMAGE, identity=True),
    "whitening-sequence": Instance(lambda: Whitening(4), SEQUENCE, identity=True),
    "full-image": Instance(lambda: InvertibleLinear(4, kind="full"), IMAGE),
    "full-sequence": Instance(lambda: InvertibleLinear(4, kind="full"), SEQUENCE),
    "full-plane": Instance(lambda: InvertibleLinear(2, kind="full"), PLANE),
    "householder-image": Instance(lambda: InvertibleLinear(4, kind="householder"), IMAGE),
    "householder-vector": Instance(lambda: InvertibleLinear(5, kind="householder"), VECTOR_5),
    "grouped-sequence": Instance(lambda: GroupedLinear(8, groups=4), (8, 6)),
    "grouped-full": Instance(lambda: GroupedLinear(8, groups=2, kind="full"), (8, 6)),
    "grouped-householder": Instance(lambda: GroupedLinear(4, kind="householder"), (4,)),
    "permute": Instance(lambda: Permute.random(5), VECTOR_5),
    "permute-image": Instance(lambda: Permute.random(4), IMAGE),
    "flip": Instance(lambda: Flip(4), SEQUENCE),
    "squeeze-channel": Instance(lambda: Squeeze2d(), (2, 4, 6)),
    "squeeze-alternative": Instance(lambda: Squeeze2d(order="alternative"), (2, 4, 6)),
    "squeeze-far": Instance(lambda: Squeeze2d(3, order="far"), (2, 3, 6)),
    "squeeze-three": Instance(lambda: Squeeze2d(3), (1, 3, 6)),
    "flatten": Instance(lambda: Flatten((2, 3, 4)), (2, 3, 4)),
    "flatten-vector": Instance(lambda: Flatten((5,)), VECTOR_5),
    "squeeze-sequence": Instance(lambda: Squeeze1d(), (3, 8)),
    "squeeze-sequence-three": Instance(lambda: Squeeze1d(3), (2, 9)),
    # Single numbers.
    "logit": Instance(lambda: Logit(0.05), (2, 3, 3)),
    "logit-tight": Instance(lambda: Logit(1e-5), (3,)),
    "scale": Instance(lambda: Scale(torch.tensor([-2.0, 0.5, 1.0, 3.0])), IMAGE),
    "scale-all": Instance(lambda: Scale(-2.0), SEQUENCE),
    "shift": Instance(lambda: Shift(-0.5), IMAGE),
    "shift-sequence": Instance(lambda: Shift(torch.tensor([1.0, 2.0])), (2, 4)),
    # Couplings of vectors.
    "additive": Instance(lambda: vector_coupling(5, lambda _: Additive()), VECTOR_5, identity=True),
    "affine": Instance(lambda: vector_coupling(5, Affine), VECTOR_5, identity=True),
    "affine-swapped": Instance(lambda: vector_coupling(5, Affine, swap=True), VECTOR_5, identity=True),
    "affine-sigmoid": Instance(lambda: vector_coupling(5, lambda c: Affine(c, scale="sigmoid")), VECTOR_5),
    "affine-tied": Instance(lambda: vector_coupling(5, lambda c: Affine(c, scale="tied")), VECTOR_5, identity=True),
    "affine-plain": Instance(lambda: vector_coupling(5, lambda c: Affine(c, scale="plain")), VECTOR_5, identity=True),
    "checkerboard-plain": Instance(
        lambda: checkerboard_coupling(1, 1, lambda c: Affine(c, scale="plain")), (1, 4, 4), identity=True
    ),
    "affine-plane": Instance(lambda: vector_coupling(2, Affine), PLANE, identity=True),
    "affine-residual": Instance(lambda: vector_coupling(4, Affine, net=ResidualMLP), (4,), identity=True),
    "affine-labels": Instance(lambda: vector_coupling(5, Affine, cond=LABELS), VECTOR_5, LABELS, identity=True),
    "affine-film": Instance(
        lambda: vector_coupling(4, Affine, cond=VECTOR, conditioning="film"), (4,), VECTOR, identity=True
    ),
    "spline": Instance(lambda: vector_coupling(5, spline), VECTOR_5, identity=True),
    "spline-plane-labels": Instance(lambda: vector_coupling(2, spline, cond=LABELS), PLANE, LABELS, identity=True),
    "mixture": Instance(lambda: vector_coupling(5, mixture), VECTOR_5),
    "mixture-plane": Instance(lambda: vector_coupling(2, mixture), PLANE),
    # Couplings of images.
    "channels-affine": Instance(lambda: channel_coupling(3, Affine), (3, 4, 4), identity=True),
    "channels-spline": Instance(lambda: channel_coupling(4, spline, GatedConvNet), IMAGE, identity=True),
    "channels-map": Instance(lambda: channel_coupling(4, Affine, cond=MAP), IMAGE, MAP, identity=True),
    "channels-fine-map": Instance(
        lambda: channel_coupling(4, Affine, cond=MAP.squeezed(2)), IMAGE, MAP.squeezed(2), identity=True
    ),
    "channels-labels": Instance(
        lambda: channel_coupling(4, Affine, ResidualConvNet, cond=LABELS), IMAGE, LABELS, identity=True
    ),
    "channels-film": Instance(
        lambda: channel_coupling(4, Affine, cond=VECTOR, conditioning="film"), IMAGE, VECTOR, identity=True
    ),
    "checkerboard": Instance(lambda: checkerboard_coupling(1, 0, Affine), (1, 4, 4), identity=True),
    "checkerboard-odd": Instance(
        lambda: checkerboard_coupling(2, 1, Affine, ResidualConvNet), (2, 3, 5), identity=True
    ),
    "checkerboard-spline": Instance(lambda: checkerboard_coupling(1, 0, spline), (1, 4, 4), identity=True),
    "checkerboard-mixture": Instance(lambda: checkerboard_coupling(1, 1, mixture), (1, 3, 4)),
    # Couplings of sequences.
    "wavenet": Instance(lambda: channel_coupling(4, Affine, WaveNet), SEQUENCE, identity=True),
    "wavenet-map": Instance(lambda: channel_coupling(4, Affine, WaveNet, cond=MAP), SEQUENCE, MAP, identity=True),
    "sequence-labels": Instance(
        lambda: channel_coupling(3, Affine, dims=1, cond=LABELS), (3, 8), LABELS, identity=True
    ),
    "sequence-spline": Instance(lambda: channel_coupling(4, spline, GatedConvNet, dims=1), SEQUENCE, identity=True),
    # Autoregressive layers.
    "maf": Instance(lambda: autoregressive(5, MeanScale()), VECTOR_5, identity=True),
    "maf-ordered": Instance(lambda: autoregressive(4, MeanScale(), order=[2, 0, 3, 1]), (4,), identity=True),
    "maf-residual": Instance(
        lambda: autoregressive(4, MeanScale(), residual=True, order=[3, 2, 1, 0]), (4,), identity=True
    ),
    "maf-affine": Instance(lambda: autoregressive(4, Affine(4)), (4,), identity=True),
    "maf-mixture": Instance(lambda: autoregressive(3, mixture(3)), (3,)),
    "maf-labels": Instance(lambda: autoregressive(3, MeanScale(), cond=LABELS), (3,), LABELS, identity=True),
    "maf-spline": Instance(lambda: autoregressive(4, RationalQuadraticSpline(bins=4)), (4,), identity=True),
    "maf-plane": Instance(lambda: autoregressive(2, MeanScale()), PLANE, identity=True),
    "iaf": Instance(lambda: Inverse(autoregressive(4, MeanScale())), (4,), identity=True),
    # Transformers over tokens.
    "meta-block": Instance(lambda: MetaBlock((2, 2, 3), **TINY), (2, 2, 3), identity=True),
    "meta-block-labels": Instance(
        lambda: MetaBlock((2, 2, 2), reverse=True, cond=LABELS, **TINY), (2, 2, 2), LABELS, identity=True
    ),
    "meta-block-sequence": Instance(lambda: MetaBlock((3, None), **TINY), (3, 6), identity=True),
    "meta-block-backwards": Instance(
        lambda: MetaBlock((3, None), reverse=True, attention="xl", **TINY), (3, 6), identity=True
    ),
    "rows": Instance(lambda: token_coupling("rows", 0), (2, 4, 3), identity=True),
    "columns": Instance(lambda: token_coupling("columns", 1), (2, 3, 4), identity=True),
    "squares": Instance(lambda: token_coupling("checkerboard", 0), (2, 3, 4), identity=True),
    "squares-labels": Instance(
        lambda: token_coupling("checkerboard", 1, cond=LABELS), (2, 3, 4), LABELS, identity=True
    ),
    # Several scales.
    "factor-out": Instance(lambda: FactorOut(4), IMAGE, identity=True),
    "factor-out-prior": Instance(lambda: FactorOut(4, prior(4)), IMAGE, identity=True),
    "factor-out-labels": Instance(lambda: FactorOut(4, prior(4, cond=LABELS)), IMAGE, LABELS, identity=True),
    "factor-out-sequence": Instance(lambda: FactorOut(4, prior(4, 1)), SEQUENCE, identity=True),
    "multiscale": Instance(
        lambda: MultiScale([Squeeze2d(), Compose([Squeeze2d(), ActNorm(8)], (2, 2, 2))], [FactorOut(4, prior(4))],
                           (1, 4, 4)),
        (1, 4, 4),
    ),
    "multiscale-sequence": Instance(sequence_flow, (4, 8)),
    # Made of others.
    "empty": Instance(lambda: Compose([], VECTOR_5), VECTOR_5, identity=True),
    "compose": Instance(
        lambda: Compose([ActNorm(4), Permute.random(4), vector_coupling(4, Affine, cond=LABELS)], (4,)), (4,), LABELS
    ),
    "compose-inverse-memory": Instance(
        lambda: Compose([ActNorm(4), InvertibleLinear(4), channel_coupling(4, Affine)], IMAGE, memory="inverse"), IMAGE
    ),
    "inverse": Instance(lambda: Inverse(vector_coupling(5, Affine)), VECTOR_5, identity=True),
    "inverse-logit": Instance(lambda: Inverse(Logit(0.05)), (3,)),
    "freeze": Instance(lambda: Freeze(channel_coupling(4, Affine)), IMAGE, identity=True),
    # Architectures.
    "realnvp-vector": Instance(lambda: realnvp_vector(5, couplings=4, hidden=8), VECTOR_5, identity=True),
    "realnvp-image": Instance(lambda: realnvp_image((1, 4, 4), hidden=8, depth=1), (1, 4, 4)),
    "dequantisation": Instance(
        lambda: dequantisation_flow((1, 4, 4), couplings=2, hidden=4, depth=1), (1, 4, 4), Condition("map", 1),
        identity=True,
    ),
    "glow-image": Instance(lambda: glow((1, 8, 8), steps=2, hidden=8), (1, 8, 8)),
    "glow-labels": Instance(lambda: glow((2, 4, 4), levels=1, steps=1, hidden=8, cond=LABELS), (2, 4, 4), LABELS),
    "glow-sequence": Instance(lambda: glow((2, None), levels=2, steps=1, hidden=8), (2, 8)),
    "tarflow": Instance(lambda: tarflow((1, 4, 4), blocks=2, **TINY), (1, 4, 4)),
    "tarflow-mixture": Instance(
        lambda: tarflow((1, 4, 4), patches="far", transform="mixture", components=3, blocks=2, **TINY), (1, 4, 4)
    ),
    "tarflow-sequence": Instance(lambda: tarflow((2, None), patch=2, blocks=2, **TINY), (2, 8)),
    "jet": Instance(lambda: jet((1, 4, 4), couplings=3, **TINY), (1, 4, 4)),
    "jet-two-levels": Instance(
        lambda: jet((1, 8, 8), couplings=2, levels=2, memory="inverse", cond=LABELS, **TINY), (1, 8, 8), LABELS
    ),
    "spline-flow": Instance(lambda: neural_spline(2, layers=2, bins=4, hidden=8), PLANE, identity=True),
    "maf-flow": Instance(
        lambda: neural_spline(3, layers=2, kind="autoregressive", transform="affine", hidden=8, mix="actnorm"), (3,)
    ),
}
