"""Networks: they know shapes, and nothing of probability."""

from genmodels.nn.blocks import Downsample, ResidualBlock, Upsample
from genmodels.nn.embedding import ConditionEmbedding, log_snr_features
from genmodels.nn.mlp import MLPDenoiser
from genmodels.nn.norm import GroupNorm, group_count
from genmodels.nn.spatial_attention import ATTENTION, SpatialAttention
from genmodels.nn.unet import UNet

__all__ = [
    "ATTENTION",
    "ConditionEmbedding",
    "Downsample",
    "GroupNorm",
    "MLPDenoiser",
    "ResidualBlock",
    "SpatialAttention",
    "UNet",
    "Upsample",
    "group_count",
    "log_snr_features",
]
