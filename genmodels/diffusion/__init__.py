"""Diffusion models as a plain library: noise schedules, denoisers, the bound term by term, samplers."""

from genmodels.diffusion.bound import (
    ElboTerms,
    PathTerms,
    ddpm_times,
    elbo,
    path_terms,
    vdm_times,
)
from genmodels.diffusion.decoder import Decoder, DiscretisedGaussian, Gaussian, to_levels, to_unit
from genmodels.diffusion.denoiser import Denoiser
from genmodels.diffusion.objectives import OBJECTIVES, Objective, ObjectiveOutput, Simple, Vlb
from genmodels.diffusion.oracle import GaussianDenoiser, MixtureDenoiser
from genmodels.diffusion.parameterisation import PARAMETERISATIONS, X0, Eps, Parameterisation, Prediction, V
from genmodels.diffusion.process import (
    VARIANCES,
    alpha_sigma,
    alpha_ts,
    posterior,
    posterior_variance,
    q_sample,
    sigma2_ts,
)
from genmodels.diffusion.samplers import (
    SAMPLERS,
    DDIMSampler,
    DDPMSampler,
    DPMSolverPP2MSampler,
    Memory,
    Sampler,
    SampleResult,
    sample,
)
from genmodels.diffusion.schedule import (
    CosineSchedule,
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
from genmodels.diffusion.spacing import (
    SPACINGS,
    integer_leading,
    integer_trailing,
    karras,
    karras_sigmas,
    uniform_log_snr,
    uniform_t,
)
from genmodels.diffusion.time_sampling import TIME_SAMPLERS, TimeSampler

SCHEDULES: dict[str, type[NoiseSchedule]] = {
    "linear": LinearSchedule,
    "linear_continuous": LinearContinuousSchedule,
    "cosine": CosineSchedule,
    "cosine_discrete": CosineDiscreteSchedule,
    "sigmoid": SigmoidSchedule,
    "linear_log_snr": LinearLogSnrSchedule,
}

__all__ = [
    "OBJECTIVES",
    "PARAMETERISATIONS",
    "SAMPLERS",
    "SCHEDULES",
    "SPACINGS",
    "TIME_SAMPLERS",
    "V",
    "VARIANCES",
    "X0",
    "CosineDiscreteSchedule",
    "CosineSchedule",
    "DDIMSampler",
    "DDPMSampler",
    "DPMSolverPP2MSampler",
    "Decoder",
    "Denoiser",
    "DiscreteSchedule",
    "DiscretisedGaussian",
    "ElboTerms",
    "Eps",
    "Gaussian",
    "GaussianDenoiser",
    "LinearContinuousSchedule",
    "LinearLogSnrSchedule",
    "LinearSchedule",
    "Memory",
    "MixtureDenoiser",
    "NoiseSchedule",
    "Objective",
    "ObjectiveOutput",
    "Parameterisation",
    "PathTerms",
    "Prediction",
    "SampleResult",
    "Sampler",
    "SigmoidSchedule",
    "Simple",
    "TimeSampler",
    "Vlb",
    "ZeroTerminalSchedule",
    "alpha_sigma",
    "alpha_ts",
    "ddpm_times",
    "elbo",
    "integer_leading",
    "integer_trailing",
    "karras",
    "karras_sigmas",
    "path_terms",
    "posterior",
    "posterior_variance",
    "q_sample",
    "rescale_zero_terminal",
    "sample",
    "sigma2_ts",
    "step_to_time",
    "to_levels",
    "to_unit",
    "uniform_log_snr",
    "uniform_t",
    "vdm_times",
]
