"""Diffusion models as a plain library: noise schedules, denoisers, the bound term by term, samplers."""

from genmodels.diffusion.altered import AlteredDenoiser, require_unaltered
from genmodels.diffusion.bound import ElboTerms, ddpm_times, elbo, vdm_times
from genmodels.diffusion.bound_path import PathTerms, path_terms
from genmodels.diffusion.continuous import Continuous, continuous_elbo
from genmodels.diffusion.decoder import Decoder, DiscretisedGaussian, Gaussian, LevelSoftmax, to_levels, to_unit
from genmodels.diffusion.denoiser import Denoiser
from genmodels.diffusion.divergence import exact_divergence, hutchinson, rademacher
from genmodels.diffusion.editing import invert, noised_start, times_from
from genmodels.diffusion.guidance import GuidedDenoiser
from genmodels.diffusion.hybrid import Hybrid
from genmodels.diffusion.inpainting import Inpainting
from genmodels.diffusion.loss_aware import LossAwareTimes
from genmodels.diffusion.multistep import DPMSolverPP2MSampler, UniPCMemory, UniPCSampler
from genmodels.diffusion.objectives import Objective, ObjectiveOutput, Simple, Vlb
from genmodels.diffusion.ode import OdeDensity, OdeLogProb
from genmodels.diffusion.ode_steps import EDMSampler, EulerSampler, HeunSampler
from genmodels.diffusion.oracle import GaussianDenoiser, MixtureDenoiser
from genmodels.diffusion.parameterisation import EDM, PARAMETERISATIONS, X0, Eps, Parameterisation, Prediction, V
from genmodels.diffusion.process import (
    VARIANCES,
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
from genmodels.diffusion.samplers import SAMPLERS, DDIMSampler, DDPMSampler
from genmodels.diffusion.sampling import Memory, Sampler, SampleResult, sample
from genmodels.diffusion.schedule import (
    CosineSchedule,
    GradTTSSchedule,
    LinearContinuousSchedule,
    LinearLogSnrSchedule,
    NoiseSchedule,
    SigmoidSchedule,
    step_to_time,
)
from genmodels.diffusion.schedule_discrete import (
    CosineDiscreteSchedule,
    DiscreteSchedule,
    LinearSchedule,
    ZeroTerminalSchedule,
    rescale_zero_terminal,
)
from genmodels.diffusion.schedule_learned import LearnedSchedule
from genmodels.diffusion.solvers import SOLVERS, SolverError
from genmodels.diffusion.spacing import (
    SPACINGS,
    integer_leading,
    integer_trailing,
    karras,
    karras_sigmas,
    uniform_log_snr,
    uniform_t,
)
from genmodels.diffusion.thresholding import THRESHOLDS, Threshold, ThresholdedDenoiser
from genmodels.diffusion.time_sampling import TIME_SAMPLERS, TimeSampler
from genmodels.diffusion.weighting import WEIGHTINGS, Weighting

SCHEDULES: dict[str, type[NoiseSchedule]] = {
    "linear": LinearSchedule,
    "linear_continuous": LinearContinuousSchedule,
    "grad_tts": GradTTSSchedule,
    "cosine": CosineSchedule,
    "cosine_discrete": CosineDiscreteSchedule,
    "sigmoid": SigmoidSchedule,
    "linear_log_snr": LinearLogSnrSchedule,
    "learned": LearnedSchedule,
}

OBJECTIVES: dict[str, type[Objective]] = {"simple": Simple, "vlb": Vlb, "hybrid": Hybrid, "continuous": Continuous}

__all__ = [
    "EDM",
    "OBJECTIVES",
    "PARAMETERISATIONS",
    "SAMPLERS",
    "SCHEDULES",
    "SOLVERS",
    "SPACINGS",
    "THRESHOLDS",
    "TIME_SAMPLERS",
    "V",
    "VARIANCES",
    "WEIGHTINGS",
    "X0",
    "AlteredDenoiser",
    "Continuous",
    "CosineDiscreteSchedule",
    "CosineSchedule",
    "DDIMSampler",
    "DDPMSampler",
    "DPMSolverPP2MSampler",
    "Decoder",
    "Denoiser",
    "DiscreteSchedule",
    "DiscretisedGaussian",
    "EDMSampler",
    "ElboTerms",
    "Eps",
    "EulerSampler",
    "Gaussian",
    "GaussianDenoiser",
    "GradTTSSchedule",
    "GuidedDenoiser",
    "HeunSampler",
    "Hybrid",
    "Inpainting",
    "LearnedSchedule",
    "LevelSoftmax",
    "LinearContinuousSchedule",
    "LinearLogSnrSchedule",
    "LinearSchedule",
    "LossAwareTimes",
    "Memory",
    "MixtureDenoiser",
    "NoiseSchedule",
    "Objective",
    "ObjectiveOutput",
    "OdeDensity",
    "OdeLogProb",
    "Parameterisation",
    "PathTerms",
    "Prediction",
    "SampleResult",
    "Sampler",
    "SigmoidSchedule",
    "Simple",
    "SolverError",
    "Threshold",
    "ThresholdedDenoiser",
    "TimeSampler",
    "UniPCMemory",
    "UniPCSampler",
    "Vlb",
    "Weighting",
    "ZeroTerminalSchedule",
    "alpha_sigma",
    "alpha_ts",
    "continuous_elbo",
    "ddpm_times",
    "elbo",
    "exact_divergence",
    "hutchinson",
    "integer_leading",
    "integer_trailing",
    "invert",
    "karras",
    "karras_sigmas",
    "kernel_variance",
    "learned_variance",
    "noised_start",
    "path_terms",
    "posterior",
    "posterior_variance",
    "q_sample",
    "rademacher",
    "renoise",
    "require_unaltered",
    "rescale_zero_terminal",
    "sample",
    "sigma2_ts",
    "step_to_time",
    "times_from",
    "to_levels",
    "to_unit",
    "uniform_log_snr",
    "uniform_t",
    "vdm_times",
]
