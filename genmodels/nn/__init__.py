"""Networks: they know shapes, and nothing of probability."""

from genmodels.nn.attention_block import AbsoluteAttention, AttentionBlock
from genmodels.nn.blocks import Downsample, ResidualBlock, Upsample
from genmodels.nn.channel_norm import ChannelNorm
from genmodels.nn.condition import Condition, Conditioning, modulate
from genmodels.nn.convolutional import ConvNet, ScaledHead
from genmodels.nn.embedding import ConditionEmbedding, log_snr_features
from genmodels.nn.gated import GatedConvNet, concat_elu
from genmodels.nn.made import MADE
from genmodels.nn.mlp import MLPDenoiser
from genmodels.nn.net import Net
from genmodels.nn.norm import GroupNorm, group_count
from genmodels.nn.perceptron import MLP, ResidualMLP
from genmodels.nn.residual import ResidualConvNet
from genmodels.nn.spatial_attention import ATTENTION, AttentionKind, SpatialAttention
from genmodels.nn.transformer import Transformer, TransformerLayer
from genmodels.nn.unet import UNet
from genmodels.nn.wavenet import WaveNet

__all__ = [
    "ATTENTION",
    "MADE",
    "MLP",
    "AbsoluteAttention",
    "AttentionBlock",
    "AttentionKind",
    "ChannelNorm",
    "Condition",
    "ConditionEmbedding",
    "Conditioning",
    "ConvNet",
    "Downsample",
    "GatedConvNet",
    "GroupNorm",
    "MLPDenoiser",
    "Net",
    "ResidualBlock",
    "ResidualConvNet",
    "ResidualMLP",
    "ScaledHead",
    "SpatialAttention",
    "Transformer",
    "TransformerLayer",
    "UNet",
    "Upsample",
    "WaveNet",
    "concat_elu",
    "group_count",
    "log_snr_features",
    "modulate",
]
