"""Networks, without any probability."""

from genmodels.nn.attention_block import ATTENTION, AbsoluteAttention, AttentionBlock, AttentionKind, SpatialAttention
from genmodels.nn.blocks import (
    ChannelNorm,
    ConditionEmbedding,
    Downsample,
    GroupNorm,
    ResidualBlock,
    Upsample,
    group_count,
    log_snr_features,
    time_features,
)
from genmodels.nn.condition import Condition, Conditioning, Net, modulate
from genmodels.nn.coupling_networks import ConvNet, GatedConvNet, ResidualConvNet, ScaledHead, WaveNet, concat_elu
from genmodels.nn.dit import CausalTransformer, DiT, TokenBlock, TokenTransformer, patchify, unpatchify
from genmodels.nn.perceptron import MADE, MLP, MLPDenoiser, ResidualMLP
from genmodels.nn.transformer import Transformer, TransformerLayer
from genmodels.nn.unet import UNet

__all__ = [
    "ATTENTION", "MADE", "MLP", "AbsoluteAttention", "AttentionBlock", "AttentionKind", "CausalTransformer",
    "ChannelNorm", "Condition", "ConditionEmbedding", "Conditioning", "ConvNet", "DiT", "Downsample", "GatedConvNet",
    "GroupNorm", "MLPDenoiser", "Net", "ResidualBlock", "ResidualConvNet", "ResidualMLP", "ScaledHead",
    "SpatialAttention", "TokenBlock", "TokenTransformer", "Transformer", "TransformerLayer", "UNet", "Upsample",
    "WaveNet", "concat_elu", "group_count", "log_snr_features", "time_features", "modulate", "patchify", "unpatchify",
]  # fmt: skip
