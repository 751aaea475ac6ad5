"""Speech as data: layouts, what is wrong with items, mels kept by contents, batches by length."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from genmodels.cli.main import main
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.data import clips as mel_files
from genmodels.data.clips import Clip, MelFiles, cell_statistics, read_clips
from genmodels.data.speech import Speech, mel_config
from genmodels.data.utterances import FLOOR, BucketedBatchSampler, Utterances, joined, padded_mels
from genmodels.speech.audio import MelConfig

RATE = 22050


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GENMODELS_CACHE", str(tmp_path / "cache"))


def noise(samples: int, seed: int = 0) -> np.ndarray:
    return (3000 * np.random.default_rng(seed).standard_normal(samples)).astype(np.int16)


def write(path, samples, rate: int = RATE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    wavfile.write(path, rate, samples)


def ljspeech(root, rows: dict[str, tuple[str, np.ndarray | None]]):
    """A folder in the layout of LJSpeech."""
    for name, (_, samples) in rows.items():
        if samples is not None:
            write(root / "wavs" / f"{name}.wav", samples)
    (root / "metadata.csv").write_text("".join(f"{name}|{text}\n" for name, (text, _) in rows.items()))
    return root


def good(count: int = 6) -> dict:
    return {f"g{k}": (f"the word {'abcdefghij'[k]}", noise(22050 + 900 * k, k)) for k in range(count)}


def test_the_embedded_clips_are_those_of_the_specification():
    data = Speech().prepare()
    items = [item for name in ("train", "val", "test") for item in data.split(name).items]
    assert len(items) == 16 and sum(item.recording.frames for item in items) == 4916
    assert [item.name for item in data.split("test").items] == ["LJ001-0013", "LJ001-0043", "LJ001-0104", "LJ001-0126"]
    found = MelFiles(MelConfig()).statistics([item.recording for item in items], "global")
    assert found["mean"] == pytest.approx(-5.23719, abs=1e-4) and found["std"] == pytest.approx(2.08785, abs=1e-4)
    spec = DataSpec.from_dict(data.spec.to_dict())
    assert spec == data.spec and spec.mel["hop"] == 256


def test_statistics_are_those_of_valid_cells_and_padding_would_show():
    mels = [torch.randn(3, 5) + 2, torch.randn(3, 9) - 1]
    cells = torch.cat(mels, 1).double()
    whole, band = cell_statistics(mels, "global"), cell_statistics(mels, "band")
    assert whole["mean"] == pytest.approx(float(cells.mean()), abs=1e-9)
    assert whole["std"] == pytest.approx(float(cells.std(correction=0)), abs=1e-9)
    assert band["mean"] == pytest.approx(cells.mean(1).tolist(), abs=1e-9)
    padded = cell_statistics([joined([mel[None] for mel in mels])[0], mels[1]], "global")
    assert abs(padded["mean"] - whole["mean"]) > 0.1


def test_silence_has_no_spread_whatever_rounding_leaves():
    for frames in range(300, 340):  # digital silence: the sum of squares is rounded
        silence = torch.full((80, frames), FLOOR)
        assert cell_statistics([silence], "global")["std"] == 0.0
        assert not any(cell_statistics([silence, silence[:, :7]], "band")["std"])


def test_a_mel_is_computed_once_and_again_when_its_file_or_the_settings_change(tmp_path, monkeypatch):
    path = tmp_path / "a.wav"
    write(path, noise(22050))
    first = MelFiles(MelConfig()).read(path)
    computed = []
    true = mel_files.log_mel
    monkeypatch.setattr(mel_files, "log_mel", lambda *given: computed.append(1) or true(*given))
    again = MelFiles(MelConfig()).read(path)
    assert again == first and not computed
    write(path, noise(22050, 1))
    assert not torch.equal(MelFiles(MelConfig()).read(path).mel(), first.mel()) and len(computed) == 1
    assert MelFiles(MelConfig(n_mels=40)).read(path).mel().shape[0] == 40 and len(computed) == 2
    first.place.write_bytes(b"cut short")
    assert torch.equal(MelFiles(MelConfig()).read(tmp_path / "a.wav").mel(), MelFiles(MelConfig()).read(path).mel())


BAD = {
    "missing": ("a text", None, r"missing .*line 7\): there is no such file.*allow_partial=true"),
    "short": ("a", noise(300), "short .*300 samples are too few.*385"),
    "empty": ("a", noise(0), "there is no sound in it"),
    "fast": ("far too many words for so short a clip", noise(4000), "too fast: 77 tokens with blanks in 15 frames"),
    "notext": ("   ", noise(22050, 9), "the text is empty"),
    "nan": ("a", np.where(np.arange(22050) == 77, np.nan, 0.1).astype(np.float32), "sample 77 is not finite"),
    "digitless": ("?!", noise(22050, 9), "no letters to read"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_item_is_named_before_training(tmp_path, name):
    text, samples, reason = BAD[name]
    root = ljspeech(tmp_path / "d", good() | {name: (text, samples)})
    with pytest.raises(InputError, match=reason):
        Speech(root=str(root), layout="ljspeech").prepare()
    with pytest.warns(UserWarning, match=f"left out 1 item of .*, such as {name} "):
        kept = Speech(root=str(root), layout="ljspeech", skip_bad=True).prepare()
    assert sum(len(kept.split(s)) for s in ("train", "val", "test")) == 6
    problems = Speech(root=str(root), layout="ljspeech").problems()
    assert len(problems) == 1 and problems[0].startswith(f"{name} (metadata.csv, line 7)")


def test_items_of_the_embedded_clips_that_are_left_out_are_said_to_be_theirs():
    with pytest.warns(UserWarning, match="left out 12 items of the embedded clips, such as LJ001-"):
        Speech(max_seconds=3, skip_bad=True).prepare()


def test_all_bad_items_of_a_list_are_found_at_once(tmp_path):
    root = ljspeech(tmp_path / "d", good() | {name: row[:2] for name, row in BAD.items()})
    (root / "wavs" / "g1.wav").write_bytes(b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\0\0\x22\x56\0\0" + bytes(8) +
                                          b"data\4\0\0\0abcd")  # no channels
    with open(root / "metadata.csv", "a") as file:
        file.write("onlyaname\n")
    problems = Speech(root=str(root), layout="ljspeech").problems()
    assert len(problems) == len(BAD) + 2
    assert any("not a readable wav file (its header is broken)" in line for line in problems if line.startswith("g1"))
    assert problems[-1].startswith("onlyaname (metadata.csv, line 14): 1 field where id|text or")
    with pytest.warns(UserWarning, match=f"left out {len(BAD) + 2} items"):
        kept = Speech(root=str(root), layout="ljspeech", skip_bad=True).prepare()
    assert sum(len(kept.split(s)) for s in ("train", "val", "test")) == 5
    with pytest.raises(InputError, match="2 items of .*by its list alone.*missing .*onlyaname"):
        Speech(root=str(root), layout="ljspeech").prepare()


def test_wrong_rate_too_long_broken_header_and_unknown_symbols(tmp_path):
    root = ljspeech(tmp_path / "d", good())
    write(root / "wavs" / "g1.wav", noise(20000), 16000)
    with pytest.raises(InputError, match=r"g1 .*16000 samples a second, declared are 22050"):
        Speech(root=str(root), layout="ljspeech", rate=RATE).prepare()
    assert Speech(root=str(root), layout="ljspeech").prepare().split("train")  # resampled where no rate is declared
    with pytest.raises(InputError, match="more than max_seconds=1"):
        Speech(root=str(root), layout="ljspeech", max_seconds=1.01).prepare()
    (root / "wavs" / "g1.wav").write_bytes(b"RIFFxx")
    with pytest.raises(InputError, match="not a readable wav file"):
        Speech(root=str(root), layout="ljspeech").prepare()
    root = ljspeech(tmp_path / "e", good() | {"odd": ('he said "so"', noise(30000, 8))})
    with pytest.raises(InputError, match=r"odd .*data.on_unknown=drop"):
        Speech(root=str(root), layout="ljspeech", on_unknown="error").prepare()
    assert any("left out" in line and "x 2" in line for line in Speech(root=str(root), layout="ljspeech").warnings())


def test_warnings_are_no_errors(tmp_path):
    rows = good() | {"quiet": ("a quiet one", np.zeros(22050, np.int16)),
                     "loud": ("a loud one", (np.sign(noise(22050)) * 32767).astype(np.int16)),
                     "twin": ("an equal", rows_of(0)), "slow": ("ab", noise(256 * 400, 5))}
    data = Speech(root=str(ljspeech(tmp_path / "d", rows)), layout="ljspeech")
    assert data.problems() == []
    messages = "\n".join(data.warnings())
    for part in ("quiet .*silent", "loud .*clipped", "twin: the same sound as g0", "slow .*400 frames for 5 tokens"):
        assert re.search(part, messages), part


def test_clipping_is_that_of_each_channel(tmp_path):
    left, right = (np.sign(noise(22050)) * 32767).astype(np.int16), noise(22050, 1)
    write(tmp_path / "a.wav", np.stack([left, right], 1))
    found = MelFiles(MelConfig()).read(tmp_path / "a.wav")
    assert found.clipped > 0.99 and found.samples == 22050


def rows_of(k: int) -> np.ndarray:
    return good()[f"g{k}"][1]


def test_lists_with_the_wrong_number_of_fields(tmp_path):
    (tmp_path / "metadata.csv").write_text("a|b\nno fields here\n")
    (tmp_path / "list.txt").write_text('a.wav|he said "x"|anna\nb.wav|hello\nc.wav|hi|anna\n|hi|anna\n')
    for name in "ac":
        write(tmp_path / f"{name}.wav", noise(22050))
    assert [clip.problem for clip in read_clips("ljspeech", tmp_path)][1].startswith("1 field where id|text")
    first, wrong, third, nameless = read_clips("manifest", tmp_path / "list.txt")
    assert first.problem is third.problem is None and first.speaker == "anna"
    assert wrong.problem == "2 fields where path|text|speaker (as in most lines) is expected: 'b.wav|hello'"
    assert nameless.where == "no name (list.txt, line 4)" and "which names the recording, is empty" in nameless.problem
    with pytest.raises(InputError, match="does not exist"):
        read_clips("folder", tmp_path / "nowhere")
    with pytest.raises(InputError, match="data.root="):
        Speech(layout="ljspeech").prepare()
    with pytest.raises(InputError, match="did you mean 'hop'"):
        Speech(mel={"hopp": 1})


def test_an_installed_wheel_says_where_its_clips_are(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mel_files, "EMBEDDED", tmp_path / "absent")
    assert main(["train", "model=glow_tts", "data=speech", f"run_dir={tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "not in its wheel" in error and "data.root=" in error


def test_a_line_separator_within_a_text_is_part_of_it(tmp_path):
    (tmp_path / "list.txt").write_text("a.wav|one\u2028two\r\n\r\nb.wav\n", encoding="utf-8")
    first, wrong = read_clips("manifest", tmp_path / "list.txt")
    assert first.text == "one\u2028two" and wrong.where == "b.wav (list.txt, line 3)"


def test_a_folder_is_no_manifest(tmp_path):
    with pytest.raises(InputError, match="is not a file: give the folder or file that this layout reads"):
        read_clips("manifest", tmp_path)


def test_manifest_with_speakers(tmp_path):
    for k in range(6):
        write(tmp_path / f"{k}.wav", noise(22050, k))
    (tmp_path / "list.txt").write_text("".join(f"{k}.wav|word {'abcdef'[k]}|{'anna' if k % 2 else 'ben'}\n"
                                               for k in range(6)))
    data = Speech(root=str(tmp_path / "list.txt"), layout="manifest").prepare()
    assert data.spec.speakers == ("anna", "ben") and data.spec.name == "list"
    batch = data.split("train").__getitems__([0, 1, 2])
    named = [data.split("train").items[k].name for k in range(3)]
    assert batch.cond.speaker.tolist() == [0 if int(name[0]) % 2 else 1 for name in named]
    with pytest.raises(InputError, match="unknown speaker 'ben', known are anna"):
        Speech(root=str(tmp_path / "list.txt"), layout="manifest", speakers=["anna"]).prepare()
    with pytest.raises(InputError, match="names a speaker twice"):
        Speech(root=str(tmp_path / "list.txt"), layout="manifest", speakers=["anna", "ben", "anna"])
    (tmp_path / "list.txt").write_text("0.wav | word a|anna\n1.wav|word b|\n")
    first, nameless = read_clips("manifest", tmp_path / "list.txt")
    assert first.path == tmp_path / "0.wav" and "speaker is missing" in nameless.problem


def test_data_has_the_whole_name_of_its_folder(tmp_path):
    (folder := tmp_path / "LJSpeech-1.1" / "wavs").mkdir(parents=True)
    for k in range(3):
        write(folder / f"{k}.wav", noise(22050, k))
    (folder.parent / "metadata.csv").write_text("".join(f"{k}|{word}|{word}\n" for k, word in enumerate("abc")))
    assert Speech(root=str(folder.parent), layout="ljspeech").prepare().spec.name == "LJSpeech-1.1"


def test_folders_of_classes_and_spoken_digits(tmp_path):
    for digit in range(3):
        for i in range(12):
            write(tmp_path / "recordings" / f"{digit}_x_{i}.wav", noise(4000 + 100 * i, 20 * digit + i), 8000)
    options = {"layout": "folder", "mel": {"sample_rate": 8000, "n_fft": 512, "hop": 128, "f_max": 4000.0}}
    data = Speech(root=str(tmp_path), **options).prepare()
    assert data.spec.num_classes == 3 and len(data.split("test")) == 15 and data.spec.text is None
    batch = data.split("test").__getitems__([0, 14])
    assert batch.cond.tolist() == [0, 2] and batch.x.shape[2] == data.spec.event_shape[1]
    assert (batch.mask.sum((1, 2)) % 8 == 0).all() and (batch.x[~batch.mask.expand_as(batch.x)] == FLOOR).all()
    for name in ("cat", "dog"):
        for i in range(5):
            write(tmp_path / "named" / name / f"{i}.wav", noise(4000, i), 8000)
    assert Speech(root=str(tmp_path / "named"), **options).prepare().spec.class_names == ("cat", "dog")
    for i in range(5):  # a class of this name is no folder of digits
        write(tmp_path / "named" / "recordings" / "far" / f"{i}.wav", noise(4000, i), 8000)
    classes = Speech(root=str(tmp_path / "named"), **options).prepare().spec.class_names
    assert classes == ("cat", "dog", "recordings")


def test_asterisk_prompts(tmp_path):
    for key in ("agent-alreadyon", "digits/1", "beep"):
        write(tmp_path / f"{key}.wav", noise(16000, len(key)), 8000)
    (tmp_path / "core-sounds-en.txt").write_text("; a comment\nagent-alreadyon: That agent is on.\n\ndigits/1: one\n"
                                                 "beep: [a tone]\ngone: never recorded\n")
    clips = read_clips("asterisk", tmp_path)
    assert [clip.text for clip in clips] == ["That agent is on.", "one"]


def test_g722_is_decoded(tmp_path):
    codec = pytest.importorskip("G722", reason="the package G722 is not installed").G722
    t = torch.arange(16000) / 16000
    tone = (8000 * torch.sin(2 * torch.pi * 440 * t)).to(torch.int16)
    (tmp_path / "tone.g722").write_bytes(codec(16000, 64000).encode(tone.numpy()))
    (found,), rate = mel_files.read_sound(tmp_path / "tone.g722")
    spectrum = torch.fft.rfft(found).abs()
    assert rate == 16000 and len(found) == 16000 and int(spectrum.argmax()) == 440
    assert float(found.abs().max()) == pytest.approx(8000 / 32768, rel=0.1)


def test_g722_without_the_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "G722", None)
    (tmp_path / "tone.g722").write_bytes(b"1234")
    with pytest.raises(mel_files.AudioError, match="genmodels\\[asterisk\\]"):
        mel_files.read_sound(tmp_path / "tone.g722")


def test_equal_texts_stay_in_one_split(tmp_path):
    rows = {f"g{k}": (f"text {'abcd'[k % 4]}", noise(22050 + 300 * k, k)) for k in range(16)}
    data = Speech(root=str(ljspeech(tmp_path / "d", rows)), layout="ljspeech", val_fraction=0.25,
                  test_fraction=0.25).prepare()
    texts = [{item.text for item in data.split(name).items} for name in ("train", "val", "test")]
    assert [len(t) for t in texts] == [2, 1, 1] and len(set().union(*texts)) == 4


def test_a_single_recording_is_too_few(tmp_path):
    data = Speech(root=str(ljspeech(tmp_path / "d", good(1))), layout="ljspeech")
    with pytest.raises(InputError, match="the val split is empty, .* there is 1 in all"):
        data.prepare()


@pytest.mark.parametrize("options", [{}, {"max_frames": 2000}])
def test_every_item_once_an_epoch_and_the_order_is_a_function_of_seed_and_epoch(options):
    frames = torch.randint(50, 800, (101,), generator=torch.Generator().manual_seed(0))
    sampler = BucketedBatchSampler(frames, 8, order_seed=3, **options)
    epochs = [[p for _, p in _epoch(sampler, k)] for k in range(2)]
    for batches in epochs:
        assert sorted(torch.cat(batches).tolist()) == list(range(101)) and len(batches) == len(sampler)
        if options:
            assert max(int(frames[p].max()) * len(p) for p in batches) <= 2000
    assert [p.tolist() for p in epochs[0]] != [p.tolist() for p in epochs[1]]
    sampler.set_position(1, 5)
    assert [p.tolist() for _, p in sampler] == [p.tolist() for p in epochs[1][5:]]
    plain = torch.randperm(101, generator=torch.Generator().manual_seed(0)).split(8)
    padded, without = (1 - frames.sum() / sum(int(frames[p].max()) * len(p) for p in some)
                       for some in (epochs[0], plain))
    assert padded < 0.15 and without > 0.3


def _epoch(sampler, epoch):
    sampler.set_epoch(epoch)
    return list(sampler)


def test_processes_share_a_batch_without_overlap():
    frames = torch.arange(50, 82)
    shares = []
    for rank in range(2):
        sampler = BucketedBatchSampler(frames, 8, processes=lambda rank=rank: (rank, 2))
        shares.append([p.tolist() for _, p in sampler])
    assert [len(a) for a in shares[0]] == [len(b) for b in shares[1]]
    assert sorted(k for share in shares for batch in share for k in batch) == list(range(32))
    with pytest.raises(InputError, match="max_frames=60"):
        BucketedBatchSampler(frames, 8, max_frames=60)


@pytest.mark.parametrize("limit", [400, 1000, 1600])
def test_no_batch_has_more_frames_than_allowed_with_its_padding(limit):
    frames = torch.randint(20, 400, (50,), generator=torch.Generator().manual_seed(0)).clamp(max=limit // 64 * 64)
    for _, positions in BucketedBatchSampler(frames, 16, max_frames=limit):
        x, _ = padded_mels([torch.zeros(2, n) for n in frames[positions].tolist()], frames[positions])
        assert len(x) * x.shape[2] <= limit


def test_classes_have_batches_of_the_longest(tmp_path):
    for label in ("one", "two"):
        (tmp_path / label).mkdir()
        for k in range(6):
            sound = np.random.default_rng(k).normal(size=RATE // 4 * (1 + k % 3)) / 10
            wavfile.write(tmp_path / label / f"{k}.wav", RATE, sound.astype("float32"))
    data = Speech(layout="folder", root=str(tmp_path), max_frames=400, val_fraction=0.2, test_fraction=0.2).prepare()
    train = data.split("train")
    for _, positions in data.training_batches(train):
        assert train.__getitems__(positions).x[:, 0].numel() <= 400
    exact = Speech(layout="folder", root=str(tmp_path), max_frames=train.length, val_fraction=0.2, test_fraction=0.2)
    assert {len(positions) for _, positions in exact.training_batches(exact.prepare().split("train"))} == {1}


@pytest.mark.parametrize("given, said", [
    ({"sample_rate": 16000.5}, "data.mel.sample_rate=16000.5 must be a whole number"),
    ({"hop": "256"}, "data.mel.hop='256' must be a number"),
    ({"hop": float("inf")}, "data.mel.hop=inf must be a whole number"),
    ({"n_mels": True}, "data.mel.n_mels=True must be a number"),
])  # fmt: skip
def test_settings_of_mels_are_numbers(given, said, refuses):
    refuses(InputError, re.escape(said), mel_config, given)


def test_whole_floats_are_whole_numbers():
    assert mel_config({"sample_rate": 16e3, "hop": 256.0}) == MelConfig(sample_rate=16000, hop=256)
    assert isinstance(mel_config({"hop": 256.0}).hop, int)


def test_recordings_with_brackets_in_their_names_keep_their_names():
    named = [Clip(Path(f"take ({k}).wav"), f"take ({k}).wav (clips.csv, line {k})") for k in (1, 2)]
    assert [clip.name for clip in named] == ["take (1).wav", "take (2).wav"]
    assert Clip(Path("take (3).wav"), "take (3).wav").name == "take (3).wav"


def test_a_missing_folder_has_no_further_warnings():
    data = Speech(layout="ljspeech", root="/nowhere")
    assert len(data.problems()) == 1 and data.warnings() == []


def test_an_item_is_the_same_alone_and_in_a_batch():
    data: Utterances = Speech().prepare().split("train")
    together = data.__getitems__(range(len(data)))
    for k in range(len(data)):
        alone = data.__getitems__([k])
        frames, tokens = int(alone.mask.sum()), int(alone.cond.mask.sum())
        assert torch.equal(alone.x[0, :, :frames], together.x[k, :, :frames])
        assert torch.equal(alone.cond.tokens[0, :tokens], together.cond.tokens[k, :tokens])
        assert frames == int(together.mask[k].sum()) and frames % 2 == 0
