"""Sound files: one that is shorter than it says is not the sound that was recorded."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from genmodels.speech.audio import AudioError, read_wav

WAVE = np.random.default_rng(0).normal(size=4000)
KINDS = {
    "8 bits": (WAVE * 20 + 128).clip(0, 255).astype(np.uint8), "16 bits": (WAVE * 8000).astype(np.int16),
    "32 bits": (WAVE * 5e8).astype(np.int32), "float": (WAVE / 8).astype(np.float32),
    "stereo": np.stack([WAVE, -WAVE / 2], 1).astype(np.float32),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_anywhere_in_its_sound_is_refused(kind, tmp_path):
    path = tmp_path / "a.wav"
    wavfile.write(path, 8000, KINDS[kind])
    whole = path.read_bytes()
    assert read_wav(path)[0].shape == (4000,)
    for share in (0.9, 0.5, 0.999):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(AudioError, match=r"a.wav: cut short, \d+ of the \d+ bytes"):
            read_wav(path)


def test_chunks_beside_the_sound_and_lengths_that_were_not_known(tmp_path):
    path = tmp_path / "a.wav"
    wavfile.write(path, 8000, KINDS["16 bits"])
    whole, true = path.read_bytes(), read_wav(path)[0]
    assert whole[36:40] == b"data"
    title = b"LIST" + struct.pack("<I", 5) + b"title" + b"\0"
    path.write_bytes(whole[:36] + title + whole[36:] + title)
    assert torch.equal(read_wav(path)[0], true)
    streamed = whole[:4] + b"\xff" * 4 + whole[8:40] + b"\xff" * 4 + whole[44:]
    path.write_bytes(streamed)
    assert torch.equal(read_wav(path)[0], true)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.wav")
    (tmp_path / "b.wav").mkdir()
    for name, kind in (("a.wav", "a pipe"), ("b.wav", "a folder")):
        with pytest.raises(AudioError, match=f"{name}: it is {kind}, not a file"):
            read_wav(tmp_path / name)
