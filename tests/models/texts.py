"""Small data with texts, for the tests of all models that speak."""

from __future__ import annotations

import torch

from genmodels.core.data import Batch, DataSpec, TextCondition
from genmodels.core.random import KeyedGenerator
from genmodels.data.utterances import FLOOR, padded_tokens
from genmodels.diffusion import GaussianDenoiser, LinearPath, Velocity
from genmodels.speech.text import CHARACTERS
from tests.parameters import scattered_model

N_MELS = 6  # not 4: plain keyed noise comes in four runs, which would hide what frames are for
TEXT = {"symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": ["a cab", "bad dad"]}
ENCODER = {"channels": 8, "depth": 1, "hidden": 8}
NET = {"channels": 8, "multipliers": [1, 2], "blocks": 1, "heads": 2}
DIFFUSION = {"encoder": ENCODER, "net": NET, "num_steps": 12, "duration_channels": 8, "speaker_channels": 4}


def spec(speakers: tuple[str, ...] = ()) -> DataSpec:
    mel = {"sample_rate": 22050, "hop": 256}
    return DataSpec("speech", (N_MELS, 64), mel=mel, statistics={"per": "global", "mean": -5.0, "std": 2.0},
                    text=TEXT, speakers=speakers)


def batch(sizes=((3, 9), (5, 14), (2, 6)), speaker: bool = False) -> Batch:
    """Items of so many (tokens, frames)."""
    generator = torch.Generator().manual_seed(0)
    longest = max(t for _, t in sizes)
    x = torch.full((len(sizes), N_MELS, longest), FLOOR)
    for row, (_, t) in zip(x, sizes, strict=True):
        row[:, :t] = -5 + 2 * torch.randn(N_MELS, t, generator=generator)
    mask = torch.stack([torch.arange(longest) < t for _, t in sizes])[:, None]
    tokens, text_mask = padded_tokens([[2 + (k + i) % 20 for i in range(n)] for k, (n, _) in enumerate(sizes)])
    said = TextCondition(tokens, text_mask, torch.arange(len(sizes)) % 2 if speaker else None)
    return Batch(x, said, mask, torch.arange(len(sizes)))


def diffusion(family: type, speakers: tuple[str, ...] = (), **options):
    """A small model of mels around the text's mean, with parameters moved at random."""
    torch.manual_seed(0)
    return scattered_model(family(spec(speakers), **DIFFUSION | options))


def gaussian(family: type, variance: float):
    """The same with the exact denoiser of what is beyond the mean as N(0, variance)."""
    found = diffusion(family, num_steps=1000)
    straight = {"parameterisation": Velocity()} if isinstance(found.core.schedule, LinearPath) else {}
    for core in (found.core, *found.ema.averages):
        core.denoiser = GaussianDenoiser(found.core.schedule, torch.zeros(N_MELS, 1), variance, **straight)
    return found


def parts_of_training(model, steps: int = 24, rate: float = 2e-2) -> tuple[dict, dict]:
    """The parts of the loss, on average over the first six and the last six of so many steps on `batch()`."""
    data, values = batch(), []
    optimizer = torch.optim.Adam(model.core.parameters(), lr=rate)
    for step in range(steps):
        loss = model.loss(data, KeyedGenerator(0, data.index, "train", step))
        optimizer.zero_grad()
        loss.value.backward()
        optimizer.step()
        values.append({name: float(part.mean()) for name, part in loss.parts.items()})
    return tuple({k: sum(v[k] for v in part) / len(part) for k in values[0]} for part in (values[:6], values[-6:]))
