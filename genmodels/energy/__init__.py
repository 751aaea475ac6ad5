"""Energy models as a plain library: score-matching losses, Langevin samplers, partition functions."""

from genmodels.energy.adaptation import DualAveraging
from genmodels.energy.annealed import annealed_langevin, predictor_corrector
from genmodels.energy.annealed_importance import GRIDS, AnnealedImportanceSampling
from genmodels.energy.base import GaussianBase
from genmodels.energy.chains import ChainResult, ChainState, Start, run_chains
from genmodels.energy.contrastive import ContrastiveDivergence
from genmodels.energy.denoising import (
    DenoisingScoreMatching,
    MultiScaleDenoising,
    largest_distance,
    noise_levels,
)
from genmodels.energy.diagnostics import effective_sample_size, split_r_hat
from genmodels.energy.function import (
    Energy,
    EnergyFunction,
    LogDensity,
    NoiseConditionalScore,
    ScoreFunction,
    ScoreNetwork,
    log_density_of,
    require_energy,
)
from genmodels.energy.guards import DivergenceGuard, require_continuous, require_finite
from genmodels.energy.hamiltonian import HMC, leapfrog
from genmodels.energy.integrals import Quadrature, expectation, quadrature
from genmodels.energy.kernel_fit import DeepKernel, DeepKernelLoss
from genmodels.energy.kernels import MALA, ULA, Kernel, Move, Point, Target
from genmodels.energy.known import DoubleWell, NormalMixture, Quadratic
from genmodels.energy.log_partition import LogPartition
from genmodels.energy.losses import (
    ExactScoreMatching,
    FiniteDifferenceScoreMatching,
    Loss,
    SlicedScoreMatching,
    SlicedScoreMatchingVR,
)
from genmodels.energy.potential import Potential
from genmodels.energy.products import cheapest_route, curl, directional, measure_routes, trace
from genmodels.energy.projections import PROJECTIONS, Gaussian, Projection, Rademacher, Sphere

LOSSES: dict[str, type[Loss]] = {
    "exact": ExactScoreMatching,
    "sliced": SlicedScoreMatching,
    "sliced_vr": SlicedScoreMatchingVR,
    "finite_difference": FiniteDifferenceScoreMatching,
    "denoising": DenoisingScoreMatching,
    "multi_scale": MultiScaleDenoising,
}

KERNELS: dict[str, type[Kernel]] = {"ula": ULA, "mala": MALA, "hmc": HMC}

__all__ = [
    "GRIDS",
    "HMC",
    "KERNELS",
    "LOSSES",
    "MALA",
    "PROJECTIONS",
    "ULA",
    "AnnealedImportanceSampling",
    "ChainResult",
    "ChainState",
    "ContrastiveDivergence",
    "DeepKernel",
    "DeepKernelLoss",
    "DenoisingScoreMatching",
    "DivergenceGuard",
    "DoubleWell",
    "DualAveraging",
    "Energy",
    "EnergyFunction",
    "ExactScoreMatching",
    "FiniteDifferenceScoreMatching",
    "Gaussian",
    "GaussianBase",
    "Kernel",
    "LogDensity",
    "LogPartition",
    "Loss",
    "Move",
    "MultiScaleDenoising",
    "NoiseConditionalScore",
    "NormalMixture",
    "Point",
    "Potential",
    "Projection",
    "Quadratic",
    "Quadrature",
    "Rademacher",
    "ScoreFunction",
    "ScoreNetwork",
    "SlicedScoreMatching",
    "SlicedScoreMatchingVR",
    "Sphere",
    "Start",
    "Target",
    "annealed_langevin",
    "cheapest_route",
    "curl",
    "directional",
    "effective_sample_size",
    "expectation",
    "largest_distance",
    "leapfrog",
    "log_density_of",
    "measure_routes",
    "noise_levels",
    "predictor_corrector",
    "quadrature",
    "require_continuous",
    "require_energy",
    "require_finite",
    "run_chains",
    "split_r_hat",
    "trace",
]
