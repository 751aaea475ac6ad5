"""A training step of Glow-TTS compared with coqui-tts, at equal sizes.

    python benchmarks/glow_tts_step.py [--threads 1] [--rounds 7] [--batch 4] [--tokens 120] [--frames 400]

Both get the same tokens and mels: text encoder, flow, alignment search, durations, backward pass and a step of Adam.
They take turns; ratios are formed within a round. Peer: `pip install --no-deps coqui-tts coqui-tts-trainer
coqpit-config monotonic-alignment-search`. Its `__init__` refuses to be imported without torchaudio and torchcodec,
which a step does not use: it is passed by, and modules for sound that are not installed are replaced by empty ones.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
import types
from unittest.mock import MagicMock

import torch
from _timing import interleaved

from genmodels.speech.glow_tts import GlowTTS, mel_decoder
from genmodels.speech.text_encoder import DurationPredictor, TextEncoder

SYMBOLS = 37
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


class Absent(types.ModuleType):
    """A module that is not installed, and not used."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


def peer() -> types.SimpleNamespace:
    """The modules of coqui-tts that a step needs."""
    spec = importlib.util.find_spec("TTS")
    if spec is None:
        raise SystemExit("coqui-tts is not installed")
    package = types.ModuleType("TTS")
    package.__path__, package.__version__ = list(spec.submodule_search_locations), ""
    sys.modules["TTS"] = package
    names = {"model": "TTS.tts.models.glow_tts", "config": "TTS.tts.configs.glow_tts_config",
             "losses": "TTS.tts.layers.losses"}
    absent: list[str] = []
    while True:
        try:
            found = {name: importlib.import_module(path) for name, path in names.items()}
            break
        except ModuleNotFoundError as error:
            if error.name in absent:
                raise
            absent.append(error.name)
            sys.modules[error.name] = Absent(error.name)
            for name in [name for name in sys.modules if name.startswith("TTS.")]:
                del sys.modules[name]
    print(f"coqui-tts without {', '.join(absent) or 'replacements'}")
    return types.SimpleNamespace(**found)


def size(module: torch.nn.Module) -> str:
    return f"{sum(p.numel() for p in module.parameters()) / 1e6:.2f} M"


def ours(tokens: torch.Tensor, mel: torch.Tensor):
    model = GlowTTS(TextEncoder(SYMBOLS), mel_decoder(), DurationPredictor(192)).train()
    model.decoder.initialize(mel)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    text_mask, mask = (torch.ones(len(x), 1, x.shape[-1], dtype=torch.bool) for x in (tokens, mel))  # as theirs has

    def step() -> float:
        optimizer.zero_grad()
        nll, duration = model.loss(model.align(mel, tokens, mask, text_mask), mask, text_mask)
        loss = (nll + duration).mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step, model


def theirs(tokens: torch.Tensor, mel: torch.Tensor):
    TTS = peer()
    config = TTS.config.GlowTTSConfig()
    config.num_chars = SYMBOLS
    model, criterion = TTS.model.GlowTTS(config).train(), TTS.losses.GlowTTSLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    text_lengths = torch.full((len(tokens),), tokens.shape[1])
    mel_lengths = torch.full((len(mel),), mel.shape[2])

    def step() -> float:
        optimizer.zero_grad()
        found = model(tokens, text_lengths, mel.mT, mel_lengths, {"d_vectors": None, "speaker_ids": None})
        loss = criterion(found["z"], found["y_mean"], found["y_log_scale"], found["logdet"], mel_lengths,
                         found["durations_log"], found["total_durations_log"], text_lengths)["loss"]
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("threads", 1), ("rounds", 7), ("batch", 4), ("tokens", 120), ("frames", 400)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    tokens = torch.randint(2, SYMBOLS, (arguments.batch, arguments.tokens))
    mel = torch.randn(arguments.batch, 80, arguments.frames)
    contestants = {}
    for name, make in (("genmodels", ours), ("coqui-tts", theirs)):
        contestants[name], model = make(tokens, mel)
        print(f"{name}: {size(model)} parameters, first loss {contestants[name]():.3f} nats per cell")
    timing = interleaved(contestants, arguments.rounds, clock=CLOCKS[arguments.clock])
    print(f"a step on {arguments.batch} x {arguments.frames} frames, {arguments.tokens} tokens, {arguments.threads} "
          f"threads, {arguments.clock} clock")
    print("  " + timing.summary("genmodels", "coqui-tts"))


if __name__ == "__main__":
    main()
