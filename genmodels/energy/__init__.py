"""Energy-based and score-based models in plain PyTorch: score-matching losses, MCMC samplers, partition functions."""

from genmodels.core.data import require_continuous
from genmodels.energy.annealed_importance import AnnealedImportanceSampling, LogPartition
from genmodels.energy.chains import (
    ChainResult,
    ChainState,
    DualAveraging,
    Start,
    effective_sample_size,
    run_chains,
    split_r_hat,
)
from genmodels.energy.denoising import (
    ContrastiveDivergence,
    DenoisingScoreMatching,
    DiffusionImportanceSampling,
    NoiseLevels,
    largest_distance,
)
from genmodels.energy.function import (
    Energy,
    EnergyFunction,
    LogDensity,
    NoiseConditionalScore,
    ScoreFunction,
    ScoreNetwork,
    cheapest_route,
    directional,
    log_density_of,
    require_energy,
    trace,
)
from genmodels.energy.ground_truth import (
    DoubleWell,
    GaussianBase,
    GaussianMixture,
    Potential,
    Quadratic,
    Quadrature,
    quadrature,
)
from genmodels.energy.kernel_fit import DeepKernel, DeepKernelLoss
from genmodels.energy.kernels import (
    HMC,
    MALA,
    ULA,
    Kernel,
    Move,
    Point,
    Target,
    annealed_langevin,
    leapfrog,
    predictor_corrector,
)
from genmodels.energy.losses import (
    PROJECTIONS,
    DivergenceGuard,
    ExactScoreMatching,
    FiniteDifferenceScoreMatching,
    Gaussian,
    Loss,
    Projection,
    Rademacher,
    SlicedScoreMatching,
    SlicedScoreMatchingVR,
    Sphere,
)

LOSSES: dict[str, type[Loss]] = {
    "exact": ExactScoreMatching,
    "sliced": SlicedScoreMatching,
    "sliced_vr": SlicedScoreMatchingVR,
    "finite_difference": FiniteDifferenceScoreMatching,
    "denoising": DenoisingScoreMatching,
}

KERNELS: dict[str, type[Kernel]] = {"ula": ULA, "mala": MALA, "hmc": HMC}

__all__ = [
    "HMC", "KERNELS", "LOSSES", "MALA", "PROJECTIONS", "ULA", "AnnealedImportanceSampling", "ChainResult",
    "ChainState", "ContrastiveDivergence", "DeepKernel", "DeepKernelLoss", "DenoisingScoreMatching",
    "DiffusionImportanceSampling", "DivergenceGuard", "DoubleWell", "DualAveraging", "Energy", "EnergyFunction",
    "ExactScoreMatching", "FiniteDifferenceScoreMatching", "Gaussian", "GaussianBase", "Kernel", "LogDensity",
    "LogPartition", "Loss", "Move", "NoiseConditionalScore", "NoiseLevels", "GaussianMixture",
    "Point", "Potential", "Projection", "Quadratic", "Quadrature", "Rademacher", "ScoreFunction", "ScoreNetwork",
    "SlicedScoreMatching", "SlicedScoreMatchingVR", "Sphere", "Start", "Target", "annealed_langevin", "cheapest_route",
    "directional", "effective_sample_size", "largest_distance", "leapfrog", "log_density_of",
    "predictor_corrector", "quadrature", "require_continuous", "require_energy", "run_chains",
    "split_r_hat", "trace",
]  # fmt: skip
