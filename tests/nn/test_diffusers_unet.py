"""One function by two packages: what ours computes, theirs does, and the other way; skipped without diffusers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from genmodels.core.errors import InputError
from genmodels.nn import UNet, log_snr_features
from genmodels.nn.diffusers_unet import from_diffusers, to_diffusers

diffusers = pytest.importorskip("diffusers", reason="parity needs diffusers (pip install -e '.[bench]')")

LOG_SNR = torch.tensor([-21.0, 3.3], dtype=torch.float64)
X = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
FITTING = {"channels": 128, "blocks": 1, "narrow_early": False}
UNETS = {
    "widths": lambda: UNet((3, 4, 4), multipliers=[1, 2], heads=4, **FITTING),
    "classes": lambda: UNet((3, 4, 4), 2, True, multipliers=[1, 1], attention_at=[4, 2], **FITTING),
    "no attention": lambda: UNet((3, 4, 4), multipliers=[1, 2], attention="none", condition=512, **FITTING),
}


def scattered(network, seed=1):
    """A network in float64 whose every weight is drawn: what starts as zero or one counts too."""
    network, generator = network.double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.05 * torch.randn(weight.shape, dtype=weight.dtype, generator=generator)
    return network.eval()


def theirs(model, log_snr, classes):
    """What a UNet2DModel makes of X, with features of float64: theirs are float32 whatever the weights."""
    features = log_snr_features(log_snr, model.config.block_out_channels[0])
    model.time_proj.forward = lambda steps: features
    with torch.no_grad():
        return model(X, 25 * (log_snr.clamp(-20, 20) + 20), classes).sample


@pytest.mark.parametrize("name", UNETS)
def test_there_and_back(name):
    unet = scattered(UNETS[name]())
    classes = None if unet.embedding.classes is None else torch.tensor([0, 2])  # the last is no class
    model = to_diffusers(unet)
    with torch.no_grad():
        expected = unet(X, LOG_SNR, classes)
        steps = 25 * (LOG_SNR.clamp(-20, 20) + 20)
        assert (model.time_proj(steps) - log_snr_features(LOG_SNR, 128)).abs().max() < 1e-3  # of steps up to 1000
        again = from_diffusers(model)(X, LOG_SNR, classes)
    assert expected.std() > 0.1
    assert (theirs(model, LOG_SNR, classes) - expected).abs().max() < 1e-10
    assert (again - expected).abs().max() < 1e-10


def test_a_model_that_was_trained_there():
    """Its second norms have scales and shifts, its queries, keys and values biases, which ours have not."""
    model = scattered(diffusers.UNet2DModel(
        in_channels=3, out_channels=3, block_out_channels=(128, 256), layers_per_block=1, attention_head_dim=None,
        resnet_time_scale_shift="scale_shift", attn_norm_num_groups=32, num_class_embeds=3,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ))  # fmt: skip
    classes = torch.tensor([1, 2])
    with torch.no_grad():
        found = from_diffusers(model)(X, LOG_SNR, classes)
    assert (found - theirs(model, LOG_SNR, classes)).abs().max() < 1e-10
    with torch.no_grad():
        model.down_blocks[1].attentions[0].to_q.bias += 1  # a mutant: it does count
    assert (found - theirs(model, LOG_SNR, classes)).abs().max() > 1e-6


@pytest.mark.parametrize("options, message", [
    ({"narrow_early": True}, "narrow_early"), ({"channels": 32}, "groups"), ({"attention": "rope2d"}, "plain"),
    ({"fourier": [2]}, "fourier"), ({"multipliers": [2, 2]}, "multipliers"),
    ({"attention_at": [4, 2]}, "heads"), ({"condition": 600}, "condition"),
])
def test_what_differs_is_named(options, message):
    with pytest.raises(InputError, match=message):
        to_diffusers(UNet((3, 4, 4), **{"multipliers": [1, 2]} | FITTING | options))


@pytest.mark.parametrize("settings, message", [
    ({"resnet_time_scale_shift": "default"}, "time_scale_shift=default"), ({"freq_shift": 1}, "freq_shift"),
    ({"norm_num_groups": 16}, "groups"), ({"up_block_types": ("UpBlock2D", "UpBlock2D")}, "blocks"),
])
def test_what_differs_there_is_named(settings, message):
    usual = {"block_out_channels": (128, 128), "resnet_time_scale_shift": "scale_shift", "attn_norm_num_groups": 32,
             "layers_per_block": 1, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
             "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}  # fmt: skip
    with pytest.raises(InputError, match=message):
        from_diffusers(diffusers.UNet2DModel(**usual | settings))


def test_features_are_not_those_of_another_step():
    """The mutant of the comparison of features: half a step off is seen."""
    steps = 25 * (LOG_SNR.clamp(-20, 20) + 20) + 0.5
    model = to_diffusers(UNETS["widths"]().double())
    assert functional.l1_loss(model.time_proj(steps), log_snr_features(LOG_SNR, 128)) > 1e-3
