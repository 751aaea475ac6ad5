"""Normalizing flows: bijections with exact log-determinants, and the flows made of them.

Whole architectures are functions named after their papers: `genmodels.flows.glow.glow`,
`genmodels.flows.realnvp.realnvp_image` and `realnvp_vector`, `genmodels.flows.neural_spline.neural_spline`.
"""

from genmodels.flows.actnorm import ActNorm
from genmodels.flows.autoregressive import MaskedAutoregressive
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
from genmodels.flows.bijection import Bijection, NotInitialized, Step
from genmodels.flows.composition import Compose, Freeze, Inverse
from genmodels.flows.continuous import ContinuousFlow
from genmodels.flows.coupling import ChannelSplit, Checkerboard, Coupling
from genmodels.flows.dequantize import UniformDequantize, VariationalDequantize, noise_condition
from genmodels.flows.discrete import DiscreteFlow, effective_samples, log_mean_exp
from genmodels.flows.elementwise import Additive, Affine, ElementTransform, MeanScale, bounded, unbounded
from genmodels.flows.flow import Flow
from genmodels.flows.linear import GroupedLinear, InvertibleLinear
from genmodels.flows.mixture import LogisticMixture
from genmodels.flows.monitor import Health, examine
from genmodels.flows.multiscale import FactorOut, Latents, MultiScale
from genmodels.flows.permute import Flip, Permute
from genmodels.flows.scaling import Logit, Scale, Shift, Standardise
from genmodels.flows.spline import RationalQuadraticSpline
from genmodels.flows.squeeze import Flatten, PadToMultiple, Squeeze1d, Squeeze2d

__all__ = [
    "ActNorm",
    "Additive",
    "Affine",
    "BASES",
    "Bijection",
    "ChannelSplit",
    "Checkerboard",
    "ClassNormal",
    "Compose",
    "ContinuousFlow",
    "Coupling",
    "DiagonalNormal",
    "DiscreteFlow",
    "Distribution",
    "ElementTransform",
    "FactorOut",
    "Flatten",
    "Flip",
    "Flow",
    "Freeze",
    "GroupedLinear",
    "Health",
    "Inverse",
    "InvertibleLinear",
    "Latents",
    "Logistic",
    "LogisticMixture",
    "Logit",
    "MaskedAutoregressive",
    "MeanScale",
    "Mixture",
    "MultiScale",
    "NotInitialized",
    "PadToMultiple",
    "Permute",
    "RationalQuadraticSpline",
    "Scale",
    "Shift",
    "Squeeze1d",
    "Squeeze2d",
    "StandardNormal",
    "Standardise",
    "Step",
    "Uniform",
    "UniformDequantize",
    "VariationalDequantize",
    "bounded",
    "effective_samples",
    "examine",
    "log_mean_exp",
    "noise_condition",
    "unbounded",
]
