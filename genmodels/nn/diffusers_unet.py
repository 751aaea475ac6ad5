"""Conversion between the U-Net and the UNet2DModel of diffusers, where the two are the same function.

They are with `narrow_early=False`, equal numbers of groups in all norms (widths of 128 or more), `plain` attention with
heads of one width, no Fourier features, one time, and sizes that halve evenly. Then

    unet(x, log_snr, cond) = model(x, 25 (log_snr + 20), cond).sample

with the log-SNR clipped to [-20, 20]; the label `num_classes` stands for no class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from genmodels.core.errors import InputError
from genmodels.nn.attention_block import SpatialAttention
from genmodels.nn.blocks import GroupNorm, ResidualBlock
from genmodels.nn.unet import UNet

if TYPE_CHECKING:
    from diffusers import UNet2DModel


def to_diffusers(unet: UNet) -> UNet2DModel:
    """The UNet2DModel of diffusers that is the same function as a U-Net, in its precision.

    Raises:
        InputError: naming the option that UNet2DModel does not have; without diffusers.
    """
    model = _diffusers()(**_configuration(unet)).to(next(unet.parameters()))
    with torch.no_grad():
        _pad(model.time_embedding.linear_1, unet.embedding.inner)
        _pad(model.time_embedding.linear_2, unet.embedding.outer)
        if unet.embedding.classes is not None:
            table = unet.embedding.classes.weight
            model.class_embedding.weight.zero_()[:, : table.shape[1]] = table
        modulation = zip(unet.modulation.weight.split(unet._modulation_widths),
                         unet.modulation.bias.split(unet._modulation_widths), strict=True)
        for (ours, theirs), (weight, bias) in zip(_pairs(unet, model, ResidualBlock), modulation, strict=True):
            for name, part in _PARTS.items():
                _copy(getattr(theirs, part), getattr(ours, name))
            theirs.time_emb_proj.weight.zero_()[:, : weight.shape[1]] = weight
            theirs.time_emb_proj.bias.copy_(bias)  # their second norm keeps its scale of one and shift of zero
        for ours, theirs in _pairs(unet, model, SpatialAttention):
            _copy(theirs.group_norm, ours.norm)
            _copy(theirs.to_out[0], ours.project_out)
            three = theirs.to_q, theirs.to_k, theirs.to_v
            for one, weight in zip(three, ours.project_in.weight.chunk(3), strict=True):
                one.weight.copy_(weight)
                one.bias.zero_()
        for ours, theirs in _plain(unet, model):
            _copy(theirs, ours)
    return model.train(unet.training)


def from_diffusers(model: UNet2DModel) -> UNet:
    """The U-Net that is the same function as a UNet2DModel, in its precision; the last class is the null class.

    A bias of the queries becomes a shift of the norm before them, whose effect on the values is subtracted.

    Raises:
        InputError: naming the setting that the U-Net does not have.
    """
    unet = _unet(model.config).to(next(model.parameters()))
    with torch.no_grad():
        _copy(unet.embedding.inner, model.time_embedding.linear_1)
        _copy(unet.embedding.outer, model.time_embedding.linear_2)
        if model.class_embedding is not None:
            _copy(unet.embedding.classes, model.class_embedding)
        weights, biases = [], []
        for ours, theirs in _pairs(unet, model, ResidualBlock):
            for name, part in _PARTS.items():
                _copy(getattr(ours, name), getattr(theirs, part))
            # (w h + b) (1 + s) + t = h (1 + s') + t' with s' = w (1 + s) - 1, t' = b (1 + s) + t.
            scale, shift = theirs.time_emb_proj.weight.chunk(2)
            scale_0, shift_0 = theirs.time_emb_proj.bias.chunk(2)
            w, b = theirs.norm2.weight, theirs.norm2.bias
            weights += [w[:, None] * scale, b[:, None] * scale + shift]
            biases += [w * (1 + scale_0) - 1, b * (1 + scale_0) + shift_0]
        unet.modulation.weight.copy_(torch.cat(weights))
        unet.modulation.bias.copy_(torch.cat(biases))
        for ours, theirs in _pairs(unet, model, SpatialAttention):
            _copy(ours.norm, theirs.group_norm)
            ours.project_in.weight.copy_(torch.cat([theirs.to_q.weight, theirs.to_k.weight, theirs.to_v.weight]))
            shift = _shift_for_bias(theirs.to_q)
            ours.norm.bias += shift
            ours.project_out.weight.copy_(theirs.to_out[0].weight)
            values = theirs.to_v.bias - theirs.to_v.weight @ shift
            ours.project_out.bias.copy_(theirs.to_out[0].bias + theirs.to_out[0].weight @ values)
        for ours, theirs in _plain(unet, model):
            _copy(ours, theirs)
    return unet.train(model.training)


#: Parts of a residual block by our name and by theirs.
_PARTS = {"norm_1": "norm1", "conv_1": "conv1", "conv_2": "conv2", "skip": "conv_shortcut"}


def _diffusers() -> type:
    try:
        from diffusers import UNet2DModel
    except ImportError:
        raise InputError("the U-Net of diffusers needs diffusers: pip install diffusers") from None
    return UNet2DModel


def _configuration(unet: UNet) -> dict[str, Any]:
    """The settings of the UNet2DModel of a U-Net."""
    stages = [*unet.down, unet.middle, *unet.up]
    attentions = [s.attention for stage in stages for s in stage if s.attention is not None]
    groups = {module.groups for module in unet.modules() if isinstance(module, GroupNorm)}
    sizes = {a.project_out.in_features // a.heads for a in attentions if isinstance(a, SpatialAttention)}
    widths = [stage[-1].block.conv_1.out_channels for stage in unet.down]
    attends = [stage[0].attention is not None for stage in unet.down]
    embedding = unet.embedding
    for wrong, option in (
        (unet.dims != 2, "events (C, T)"),
        (unet.fourier, "fourier"),
        (unet.stem.out_channels != widths[0], "multipliers that do not begin with 1"),
        (embedding.two_times, "two times"),
        (unet.narrow_early and len(set(widths)) > 1, "narrow_early=true"),
        (not all(isinstance(a, SpatialAttention) for a in attentions), "an attention other than plain"),
        (len(sizes) > 1, "heads of several widths"),
        (len(groups) > 1, f"norms of {' and '.join(map(str, sorted(groups)))} groups (widths of 128 or more have 32)"),
        (embedding.outer.out_features > embedding.inner.out_features, "condition above 4 channels"),
    ):
        if wrong:
            raise InputError(f"no UNet2DModel of diffusers is this U-Net: it has {option}")
    return {
        "in_channels": unet.in_channels, "out_channels": unet.head.out_channels, "block_out_channels": tuple(widths),
        "layers_per_block": len(unet.down[0]), "resnet_time_scale_shift": "scale_shift",
        "down_block_types": tuple("AttnDownBlock2D" if a else "DownBlock2D" for a in attends),
        "up_block_types": tuple("AttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attends)),
        "add_attention": unet.middle[0].attention is not None, "attention_head_dim": next(iter(sizes), None),
        "norm_num_groups": groups.pop(), "attn_norm_num_groups": unet.head_norm.groups, "norm_eps": unet.head_norm.eps,
        "dropout": unet.middle[0].block.dropout.p, "freq_shift": 0, "flip_sin_to_cos": True,
        "num_class_embeds": None if embedding.num_classes is None else embedding.num_classes + 1,
    }  # fmt: skip


def _unet(config: Any) -> UNet:
    """A U-Net for the settings of a UNet2DModel."""
    required = {
        "resnet_time_scale_shift": "scale_shift", "time_embedding_type": "positional", "time_embedding_dim": None,
        "freq_shift": 0, "flip_sin_to_cos": True, "center_input_sample": False, "downsample_padding": 1,
        "downsample_type": "conv", "upsample_type": "conv", "mid_block_type": "UNetMidBlock2D",
        "mid_block_scale_factor": 1, "act_fn": "silu", "norm_eps": 1e-5, "class_embed_type": None,
    }  # fmt: skip
    for name, value in required.items():
        if config[name] != value:
            raise InputError(f"no U-Net is this UNet2DModel: it has {name}={config[name]}, not {value}")
    widths, kinds = list(config.block_out_channels), list(config.down_block_types)
    attends = ["Attn" in kind for kind in kinds]
    mirrored = [kind.replace("Down", "Up") for kind in reversed(kinds)]
    if not set(kinds) <= {"DownBlock2D", "AttnDownBlock2D"} or mirrored != list(config.up_block_types):
        raise InputError(f"no U-Net is this UNet2DModel: its blocks are {kinds} and {list(config.up_block_types)}")
    if any(width % widths[0] for width in widths):
        raise InputError(f"no U-Net is this UNet2DModel: {widths} are no multiples of the first")
    if any(attends) and not config.add_attention:
        raise InputError("no U-Net is this UNet2DModel: it attends, but not in the middle")
    attending = {width for width, a in zip(widths, attends, strict=True) if a} | {widths[-1]}
    heads = {width // (config.attention_head_dim or width) for width in attending if config.add_attention} or {1}
    if len(heads) > 1:
        raise InputError(f"no U-Net is this UNet2DModel: its levels have {' and '.join(map(str, sorted(heads)))} heads")
    side, out = 2 ** len(widths), config.out_channels
    double = out == 2 * config.in_channels
    channels = out // 2 if double else out
    unet = UNet(
        (channels, side, side), None if config.num_class_embeds is None else config.num_class_embeds - 1, double,
        config.in_channels - channels, channels=widths[0], multipliers=[width // widths[0] for width in widths],
        blocks=config.layers_per_block, attention_at=[side >> level for level, a in enumerate(attends) if a],
        attention="plain" if config.add_attention else "none", heads=heads.pop(), dropout=config.dropout,
        condition=4 * widths[0], narrow_early=False,
    )  # fmt: skip
    groups = {module.groups for module in unet.modules() if isinstance(module, GroupNorm)}
    theirs = {config.norm_num_groups} | ({config.attn_norm_num_groups} if config.add_attention else set())
    if groups != theirs:
        raise InputError(f"no U-Net is this UNet2DModel: its norms have {theirs} groups, those of a U-Net {groups}")
    return unet


def _pairs(unet: UNet, model: UNet2DModel, kind: type) -> list[tuple[nn.Module, nn.Module]]:
    """Our residual blocks, or attentions, and theirs, in order."""
    theirs = [*model.down_blocks, model.mid_block, *model.up_blocks]
    stages = [s for stage in (*unet.down, unet.middle, *unet.up) for s in stage]
    if kind is ResidualBlock:
        found = [s.block for s in stages], [r for block in theirs for r in block.resnets]
    else:
        found = ([s.attention for s in stages if s.attention is not None],
                 [a for block in theirs for a in getattr(block, "attentions", None) or [] if a is not None])
    return list(zip(*found, strict=True))


def _plain(unet: UNet, model: UNet2DModel) -> list[tuple[nn.Module, nn.Module]]:
    """Convolutions and the last norm, which are the same in both."""
    down = [s.conv for block in model.down_blocks for s in block.downsamplers or []]
    up = [s.conv for block in model.up_blocks for s in block.upsamplers or []]
    return [(unet.stem, model.conv_in), (unet.head_norm, model.conv_norm_out), (unet.head, model.conv_out),
            *zip([s.conv for s in unet.down_samples], down, strict=True),
            *zip([s.conv for s in unet.up_samples], up, strict=True)]


def _shift_for_bias(query: nn.Linear) -> Tensor:
    """The shift d of the inputs that equals the bias of the queries, W_q d = b_q."""
    weight, bias = query.weight.double(), query.bias.double()
    found = torch.linalg.lstsq(weight, bias[:, None]).solution[:, 0]
    if float((weight @ found - bias).abs().max()) > 1e-9 * max(1.0, float(bias.abs().max())):
        raise InputError("no U-Net is this UNet2DModel: its queries have a bias that no input makes")
    return found.to(query.weight.dtype)


def _copy(target: nn.Module, source: nn.Module | None) -> None:
    if source is not None and not isinstance(source, nn.Identity):
        target.load_state_dict(source.state_dict())


def _pad(target: nn.Linear, source: nn.Linear) -> None:
    """Copy a layer into a larger one, the rest of whose weights are zero."""
    target.weight.zero_()[: source.out_features, : source.in_features] = source.weight
    target.bias.zero_()[: source.out_features] = source.bias
