"""Diffusion models as a plain library: noise schedules, denoisers, the ELBO term by term, samplers."""

from genmodels.diffusion.bound import ElboTerms, PathTerms, continuous_elbo, ddpm_times, elbo, path_terms
from genmodels.diffusion.decoder import Decoder, DiscretisedGaussian, Gaussian, LevelSoftmax, to_levels, to_unit
from genmodels.diffusion.denoiser import Denoiser, FlowMap, OnPath
from genmodels.diffusion.exact import GaussianDenoiser, MixtureDenoiser
from genmodels.diffusion.few_steps import (
    Consistency,
    ConsistencySampler,
    FlowMapMatching,
    MeanFlow,
    ProgressiveDistillation,
    Shortcut,
)
from genmodels.diffusion.flow_matching import Coupling, FlowMatching, make_path, velocity_of
from genmodels.diffusion.generation import DiffusionSampler, Inpainting, SamplingPlan, invert, noised_start, times_from
from genmodels.diffusion.guidance import (
    THRESHOLDS,
    AlteredDenoiser,
    GuidedDenoiser,
    Threshold,
    ThresholdedDenoiser,
    require_unaltered,
)
from genmodels.diffusion.likelihood import Elbo, ElboEstimate, OdeLikelihood
from genmodels.diffusion.objectives import (
    OBJECTIVES,
    Continuous,
    Hybrid,
    Objective,
    ObjectiveOutput,
    Simple,
    Vlb,
    default_variance,
    make_objective,
)
from genmodels.diffusion.ode import OdeDensity, OdeLogProb, exact_divergence, hutchinson, rademacher
from genmodels.diffusion.parameterisation import (
    EDM,
    PARAMETERISATIONS,
    X0,
    Eps,
    Parameterisation,
    Prediction,
    V,
    Velocity,
)
from genmodels.diffusion.path import (
    VARIANCES,
    LinearPath,
    Path,
    alpha_sigma,
    alpha_ts,
    kernel_variance,
    learned_variance,
    posterior,
    posterior_variance,
    q_sample,
    renoise,
    sigma2_ts,
)
from genmodels.diffusion.samplers import (
    DIFFUSIONS,
    SAMPLERS,
    DDIMSampler,
    DDPMSampler,
    DPMSolverPP2MSampler,
    EDMSampler,
    EulerSampler,
    FlowMapSampler,
    FlowSampler,
    HeunSampler,
    SDESampler,
    UniPCMemory,
    UniPCSampler,
)
from genmodels.diffusion.sampling import (
    SPACINGS,
    Memory,
    Sampler,
    SampleResult,
    integer_leading,
    integer_trailing,
    karras,
    karras_sigmas,
    sample,
    uniform_log_snr,
    uniform_t,
)
from genmodels.diffusion.schedule import (
    CosineSchedule,
    GradTTSSchedule,
    LearnedSchedule,
    LinearContinuousSchedule,
    LinearLogSnrSchedule,
    NoiseSchedule,
    SigmoidSchedule,
    step_to_time,
)
from genmodels.diffusion.schedule_discrete import (
    SCHEDULES,
    CosineDiscreteSchedule,
    DiscreteSchedule,
    LinearSchedule,
    ZeroTerminalSchedule,
    default_ends,
    make_schedule,
    rescale_zero_terminal,
)
from genmodels.diffusion.solvers import SOLVERS, SolverError
from genmodels.diffusion.weighting import TIME_SAMPLERS, WEIGHTINGS, LossAwareTimes, TimeSampler, Weighting

__all__ = [
    "DIFFUSIONS", "EDM", "OBJECTIVES", "PARAMETERISATIONS", "SAMPLERS", "SCHEDULES", "SOLVERS", "SPACINGS",
    "THRESHOLDS", "TIME_SAMPLERS", "V", "VARIANCES", "WEIGHTINGS", "X0", "AlteredDenoiser", "Consistency",
    "ConsistencySampler", "Continuous", "CosineDiscreteSchedule", "CosineSchedule", "Coupling", "DDIMSampler",
    "DDPMSampler", "DPMSolverPP2MSampler", "Decoder", "Denoiser", "DiffusionSampler", "DiscreteSchedule",
    "DiscretisedGaussian", "EDMSampler", "Elbo", "ElboEstimate", "ElboTerms", "Eps", "EulerSampler", "FlowMap",
    "FlowMapMatching", "FlowMapSampler", "FlowMatching", "FlowSampler", "Gaussian", "GaussianDenoiser",
    "GradTTSSchedule", "GuidedDenoiser", "HeunSampler", "Hybrid", "Inpainting", "LearnedSchedule", "LevelSoftmax",
    "LinearContinuousSchedule", "LinearLogSnrSchedule", "LinearPath", "LinearSchedule", "LossAwareTimes", "MeanFlow",
    "Memory", "MixtureDenoiser", "NoiseSchedule", "Objective", "ObjectiveOutput", "OdeDensity", "OdeLikelihood",
    "OdeLogProb", "OnPath", "Parameterisation", "Path", "PathTerms", "Prediction", "ProgressiveDistillation",
    "SDESampler", "SampleResult", "Sampler", "SamplingPlan", "SigmoidSchedule", "Shortcut", "Simple", "SolverError",
    "Threshold", "ThresholdedDenoiser", "TimeSampler", "UniPCMemory", "UniPCSampler", "Velocity", "Vlb", "Weighting",
    "ZeroTerminalSchedule", "alpha_sigma", "alpha_ts", "continuous_elbo", "ddpm_times", "default_ends",
    "default_variance", "elbo", "exact_divergence", "hutchinson", "integer_leading", "integer_trailing", "invert",
    "karras", "karras_sigmas", "kernel_variance", "learned_variance", "make_objective", "make_path", "make_schedule",
    "noised_start", "path_terms", "posterior", "posterior_variance", "q_sample", "rademacher", "renoise",
    "require_unaltered", "rescale_zero_terminal", "sample", "sigma2_ts", "step_to_time", "times_from", "to_levels",
    "to_unit", "uniform_log_snr", "uniform_t", "velocity_of",
]  # fmt: skip
