"""Normalizing flows: bijections with exact log-determinants, and the flows made of them.

Whole architectures are functions named after their papers: `genmodels.flows.multiscale.glow`,
`genmodels.flows.coupling_flows.realnvp_image` and `realnvp_vector`, `genmodels.flows.spline.neural_spline`.
"""

from genmodels.core.data import Latents
from genmodels.core.likelihood import log_mean_exp
from genmodels.flows.bases import (
    BASES,
    ClassNormal,
    DiagonalNormal,
    Distribution,
    Logistic,
    Mixture,
    StandardNormal,
    Uniform,
)
from genmodels.flows.bijection import Bijection, Freeze, Inverse, NotInitialized, Step
from genmodels.flows.composition import Compose
from genmodels.flows.coupling import ChannelSplit, Checkerboard, Coupling, MaskedAutoregressive
from genmodels.flows.dequantize import OfLevel, UniformDequantize, VariationalDequantize, noise_condition
from genmodels.flows.discrete import ContinuousFlow, DiscreteFlow
from genmodels.flows.elementwise import (
    Additive,
    Affine,
    ElementTransform,
    LogisticMixture,
    MeanScale,
    bounded,
    unbounded,
)
from genmodels.flows.flow import Flow
from genmodels.flows.linear import Flip, GroupedLinear, InvertibleLinear, Permute, Whitening
from genmodels.flows.multiscale import FactorOut, MultiScale
from genmodels.flows.replay import Health, examine
from genmodels.flows.scaling import ActNorm, Logit, Scale, Shift, Standardise
from genmodels.flows.spline import RationalQuadraticSpline
from genmodels.flows.squeeze import Flatten, PadToMultiple, Squeeze1d, Squeeze2d

__all__ = [
    "ActNorm", "Additive", "Affine", "BASES", "Bijection", "ChannelSplit", "Checkerboard", "ClassNormal", "Compose",
    "ContinuousFlow", "Coupling", "DiagonalNormal", "DiscreteFlow", "Distribution", "ElementTransform", "FactorOut",
    "Flatten", "Flip", "Flow", "Freeze", "GroupedLinear", "Health", "Inverse", "InvertibleLinear", "Latents",
    "Logistic", "LogisticMixture", "Logit", "MaskedAutoregressive", "MeanScale", "Mixture", "MultiScale",
    "NotInitialized", "OfLevel", "PadToMultiple", "Permute", "RationalQuadraticSpline", "Scale", "Shift", "Squeeze1d",
    "Squeeze2d", "StandardNormal", "Standardise", "Step", "Uniform", "UniformDequantize", "VariationalDequantize",
    "Whitening", "bounded", "examine", "log_mean_exp", "noise_condition", "unbounded",
]  # fmt: skip
