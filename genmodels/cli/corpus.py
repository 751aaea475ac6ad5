"""`genmodels corpus`: speech to train on, from a text and a text-to-speech program of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from genmodels.core.errors import at_least, counted, none_or_at_least
from genmodels.core.files import check_writable, typed
from genmodels.speech.corpus import VOICES, check_voice, corpus, default_sentences, sentences_of


def run(
    *,
    out: str,
    text: str | None = None,
    voice: str = "rms",
    n: int | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> None:
    """Let an installed voice read a text, as recordings that data=speech data.layout=ljspeech reads.

    The same command resumes where a killed one stopped, and a larger n adds to what is there.

    Arguments:
        out: the folder of metadata.csv and wavs/, 16 kHz.
        text: a file of sentences, one per line, or of paragraphs between empty lines, which is read in parts of at most
            100 characters, equal ones once; null for sentences with numbers and names mixed with those of the
            documentation in Python's standard library.
        voice: rms, slt, awb, kal16 (by flite), slt_hts (by festival), espeak.
        n: the first so many sentences; null for all of a file, or 3,400 (three hours) of those without a file.
        workers: clips made at the same time; null for one per CPU.
        progress: show a progress bar.
    """
    folder, workers = Path(out).expanduser(), (os.cpu_count() or 1) if workers is None else workers
    at_least(1, workers=workers)
    none_or_at_least(1, n=n)
    check_voice(voice)
    check_writable("out", folder / "metadata.csv")
    texts = default_sentences(n or 3400) if text is None else sentences_of(Path(text).expanduser())[:n]
    seconds = corpus(folder, texts, voice, workers=workers, progress=progress)
    minutes = sum(seconds) / 60
    length = f"{minutes / 60:.2f} hours" if minutes >= 60 else f"{minutes:.1f} minutes"
    print(f"{counted(len(seconds), 'clip')} in {folder}, {length} by voice {voice}. {VOICES[voice].licence}")
    print(f"train:    genmodels train experiment=glow_tts_corpus {typed('data.root', folder)}")
