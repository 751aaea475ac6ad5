"""Attention with relative positions: one core; position, mask and backend are plugged in.

    Attention(dim, heads, position)      the core, with `weights`, `explain` and a `Cache`
    build_mask                           causal, window, chunk, trigger, padding
    TransformerXL, Shaw, MusicTransformer, T5Bias, ALiBi, Rotary      along a sequence
    Swin2d, Rotary2d, MelPosition                                     on maps

Other mechanisms, with the same signature and the same masks:

    ScoredAttention(dim, heads, score)   of a decoder to a memory; Additive, Location, ScaledDot
    HardAttention(dim, heads, score)     to one key, straight through
    LocalDenseSynthesizer, LocalMonotonic, Nystrom, LSH
"""

from genmodels.nn.attention.approximate import LSH, Nystrom, rotation_hash, sign_bits, sign_hash
from genmodels.nn.attention.backend import Path, Reach, build_mask, check_full, check_padding, hide_rows, masked_softmax
from genmodels.nn.attention.core import Attention, Cache, StaticCache
from genmodels.nn.attention.local import LocalDenseSynthesizer, LocalMonotonic, Place
from genmodels.nn.attention.position import (
    DistanceBias,
    Position,
    Rotary,
    Rotary2d,
    rel_shift,
    relative_positions,
    sinusoids,
    skew,
)
from genmodels.nn.attention.relative_bias import ALiBi, MelPosition, Swin2d, T5Bias
from genmodels.nn.attention.relative_keys import MusicTransformer, Shaw, TransformerXL
from genmodels.nn.attention.seq2seq import (
    Additive,
    HardAttention,
    Keys,
    Location,
    Past,
    ScaledDot,
    Score,
    ScoredAttention,
    straight_through,
)

__all__ = [
    "ALiBi", "Additive", "Attention", "Cache", "DistanceBias", "HardAttention", "Keys", "LSH", "LocalDenseSynthesizer",
    "LocalMonotonic", "Location", "MelPosition", "MusicTransformer", "Nystrom", "Past", "Path", "Place", "Position",
    "Reach", "Rotary", "Rotary2d", "ScaledDot", "Score", "ScoredAttention", "Shaw", "StaticCache", "Swin2d", "T5Bias",
    "TransformerXL", "build_mask", "check_full", "check_padding", "hide_rows", "masked_softmax", "rel_shift",
    "relative_positions", "rotation_hash", "sign_bits", "sign_hash", "sinusoids", "skew", "straight_through",
]  # fmt: skip
