"""`genmodels transcribe`: files by name, n-best lists, and mistakes in one line; `evaluate` of the same checkpoint."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import genmodels as gm
from genmodels.cli import transcribe
from genmodels.cli.main import main
from genmodels.cli.transcribe import recorded
from genmodels.core.data import Batch, DataSpec, TextCondition
from genmodels.core.errors import InputError
from genmodels.core.files import located
from genmodels.data.speech import Speech
from genmodels.data.utterances import FLOOR, characters
from genmodels.evaluation.checkpoint import Request
from genmodels.evaluation.speech import _recognised, _recogniser
from genmodels.models.checkpoint import load_model
from genmodels.models.glow_tts import GlowTTS
from genmodels.models.masked_diffusion import LanguageModel
from genmodels.models.recognizer import Recognizer
from genmodels.models.transcription import TrainedRecogniser, language_of, length_multiple
from genmodels.speech.audio import log_mel, read_wav, resample, write_wav
from genmodels.speech.decoding import Search
from genmodels.speech.recognition import pooled, word_edits
from tests.cli.test_say import checkpoint
from tests.speech.test_audio import speechlike
from tests.untrained import write

NET = {"channels": 8, "depth": 1, "heads": 2, "hidden": 8, "convolution": 3}
FOLDER = tempfile.TemporaryDirectory()  # until the tests end
FILES = [f"{FOLDER.name}/{name}.wav" for name in ("first", "second")]
for seed, file in enumerate(FILES):
    write_wav(file, speechlike(40_000 + 15_000 * seed, seed), 22050)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("run"), lambda spec, encoder, **options: Recognizer(spec, **options),
                      net=NET)


def test_files_are_transcribed_in_their_order(ckpt, capsys):
    assert main(["transcribe", *FILES, f"ckpt={ckpt}"]) == 0
    greedy = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in greedy] == FILES
    assert main(["transcribe", f"ckpt={ckpt}", FILES[1], "beam=4", "nbest=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    scores = [float(line.removeprefix(f"{FILES[1]}: ").split()[0]) for line in lines]
    found = gm.load(ckpt).transcribe(FILES[1], beam=4, nbest=3)
    assert lines == [f"{one.file}: {one.score:.2f} {one.text}" for one in found]
    assert len(lines) == 3 and scores == sorted(scores, reverse=True) and scores[0] < 0
    with pytest.raises(InputError, match="times must be true or false, got 'perhaps'"):
        gm.load(ckpt).transcribe(FILES[1], times="perhaps")


def batches_hear_what_single_recordings_say(ckpt):
    """Three recordings of other lengths in batches of two: texts and scores are those of each alone, in order."""
    model, files = gm.load(ckpt), [*FILES, FILES[0]]
    assert len({read_wav(file)[0].shape for file in FILES}) == 2
    one, two = (model.transcribe(files, beam=4, nbest=2, batch_size=n) for n in (1, 2))
    assert [(a.file, a.text) for a in one] == [(b.file, b.text) for b in two]
    assert [a.score for a in one] == pytest.approx([b.score for b in two], rel=1e-5)


def test_batches_hear_what_single_recordings_say(ckpt, monkeypatch):
    batches_hear_what_single_recordings_say(ckpt)
    padded = transcribe.padded_mels

    def without_mask(mels, lengths):
        x, mask = padded(mels, lengths)
        return x, torch.ones_like(mask)

    monkeypatch.setattr(transcribe, "padded_mels", without_mask)
    with pytest.raises(AssertionError):
        batches_hear_what_single_recordings_say(ckpt)


def test_a_language_model_and_times_and_streams(tmp_path, capsys):
    net = {**NET, "attention": "xl_chunks"}
    ckpt = checkpoint(tmp_path, lambda spec, encoder, **options: Recognizer(spec, **options), net=net)
    (tmp_path / "book.txt").write_text("So it is.\n\nIn being comparatively modern.\n")
    assert main(["transcribe", f"ckpt={ckpt}", FILES[0], "beam=2", f"lm={tmp_path}/book.txt", "lm_weight=0.5"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    (tmp_path / "long.txt").write_text(f"So it is.\nOf 1{'0' * 310} men.\n")
    assert main(["transcribe", f"ckpt={ckpt}", FILES[0], "beam=2", f"lm={tmp_path}/long.txt"]) == 2
    assert "long.txt, line 2: " in capsys.readouterr().err
    scores = []
    for more in ([], ["rescore=true"]):
        words = [f"ckpt={ckpt}", FILES[0], "beam=4", "nbest=4", f"lm={tmp_path}/book.txt", *more]
        assert main(["transcribe", *words]) == 0
        scores.append([float(line.split(": ")[1].split()[0]) for line in capsys.readouterr().out.splitlines()])
    assert scores[0][0] >= scores[1][0] and scores[1] == sorted(scores[1], reverse=True)
    assert main(["transcribe", f"ckpt={ckpt}", FILES[0], "times=true"]) == 0
    first, *words = capsys.readouterr().out.splitlines()
    assert [word.split()[2] for word in words] == first.removeprefix(f"{FILES[0]}: ").split()
    assert main(["transcribe", f"ckpt={ckpt}", FILES[0], "stream=true"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == first


def test_a_text_without_times_is_printed_all_the_same(ckpt, capsys, monkeypatch):
    def no_path(*arguments, **options):
        raise ValueError("82 characters have no path in 82 frames")

    monkeypatch.setattr(Recognizer, "times", no_path)
    assert main(["transcribe", f"ckpt={ckpt}", *FILES[:2], "times=true"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2 and err.count("no times: 82 characters have no path") == 2 and FILES[1] in err


def test_a_language_model_from_a_checkpoint(ckpt, tmp_path, capsys):
    """Scores with and without differ by its weighted log-probability; a checkpoint of another family is refused."""
    torch.manual_seed(0)
    net = {"channels": 8, "depth": 1, "heads": 2, "hidden": 8}
    model = LanguageModel(DataSpec("text", (1, 64), levels=256, encoding="utf-8"), net=net, ema_decay=0.0)
    write(model, tmp_path / "foreign.ckpt")
    with torch.no_grad():
        model.core.head.bias[ord("a") : ord("z")] += 3  # as if it had read English
    write(model, tmp_path / "lm.ckpt")
    words = ["transcribe", f"ckpt={ckpt}", FILES[0], "beam=4", "nbest=4"]
    found = []
    for more in ([], [f"lm={tmp_path}/lm.ckpt", "lm_weight=0.5", "rescore=true"]):
        assert main([*words, *more]) == 0
        lines = [line.removeprefix(f"{FILES[0]}: ") for line in capsys.readouterr().out.splitlines()]
        found.append({line.partition(" ")[2]: float(line.split()[0]) for line in lines})
    recogniser, header = load_model(located(ckpt))
    own = language_of(recogniser, f"{tmp_path}/lm.ckpt")
    (texts,) = recogniser.transcribe(transcribe.recordings(recogniser, header, FILES[:1])[0][1], Search(beam=4))
    assert len(texts) == len(found[0]) == len(found[1]) == 4
    for one in texts:
        text = recogniser.written(one)  # without the spaces at its ends, which have probabilities too
        assert found[1][text] == pytest.approx(found[0][text] + 0.5 * own.log_prob(one.tokens), abs=0.011)
    assert main([*words, f"lm={tmp_path}/lm.ckpt"]) == 0
    assert main([*words, f"lm={ckpt}/best.ckpt"]) == 2
    assert "holds a recognizer: train one by model=language_model" in capsys.readouterr().err
    assert main([*words, f"lm={tmp_path}/foreign.ckpt"]) == 2
    assert "gives the characters of the recogniser 13% of its probability: train it on texts" in capsys.readouterr().err


def test_a_text_of_another_alphabet_is_no_language_model(ckpt, tmp_path, capsys):
    words = ["transcribe", f"ckpt={ckpt}", FILES[0], "beam=2", f"lm={tmp_path}/book.txt"]
    for text, share, first in (("\u043f\u0440\u0438\n", "100%", "\u043f"), ("so \u0434\u0430\n", "50%", "\u0434")):
        (tmp_path / "book.txt").write_text(text, encoding="utf-8")
        assert main(words) == 2
        assert f"does not write {share} of its letters, such as {first!r}" in capsys.readouterr().err
    (tmp_path / "book.txt").write_text("so it is, said \u0434\n", encoding="utf-8")  # a letter of a dozen
    assert main(words) == 0


def test_the_other_recordings_are_transcribed_where_one_cannot_be_read(ckpt, tmp_path, capsys):
    (tmp_path / "cut.wav").write_bytes(Path(FILES[1]).read_bytes()[:999])
    assert main(["transcribe", f"ckpt={ckpt}", "nowhere.wav", FILES[0], f"{tmp_path}/cut.wav"]) == 2
    said = capsys.readouterr()
    assert said.out.startswith(f"{FILES[0]}: ") and said.out.count("\n") == 1
    assert "nowhere.wav: there is no such file; " in said.err and "cut.wav: truncated" in said.err
    wave, rate = read_wav(FILES[0])
    write_wav(tmp_path / "telephone.wav", resample(wave, rate, 8000), 8000)
    assert main(["transcribe", f"ckpt={ckpt}", f"{tmp_path}/telephone.wav"]) == 0
    assert "has 8,000 samples a second and no sound above 4,000 Hz" in capsys.readouterr().err


def test_recordings_have_the_silence_at_their_end_that_the_data_give_them(ckpt, tmp_path, monkeypatch):
    """Of data with multiple=2 a mel of 157 frames has 158 in training, evaluation and here; no word ends in them."""
    model, header = load_model(located(ckpt))
    path = f"{tmp_path}/odd.wav"
    write_wav(path, speechlike(157 * 256, 3), 22050)
    bare = recorded(path, model.spec.mel)
    assert bare.shape[1] == 157 and length_multiple(header) == 2
    ((_, batch, seconds),) = transcribe.recordings(model, header, [path])
    assert batch.x.shape[2] == 158 and torch.equal(batch.x[0, :, :157], bare) and seconds == 157 * 256 / 22050
    assert torch.equal(batch.x[..., 157], torch.full_like(batch.x[..., 157], FLOOR))
    wave, rate = read_wav(path)
    assert TrainedRecogniser(str(ckpt), "cpu")._mel(wave, rate).shape[2] == 158
    monkeypatch.setattr(Recognizer, "times", lambda *given, **options: [("so", 1.0, 9.0)])
    (found,) = gm.load(ckpt).transcribe(path, times=True)
    assert found.words == [("so", 1.0, seconds)]


@pytest.mark.parametrize("data, expected", [
    ({"_target_": "genmodels.data.speech.Speech"}, 2), ({"_target_": "genmodels.data.speech.Speech", "multiple": 6}, 6),
    ({"_target_": "genmodels.data.speech.Speech", "layout": "folder", "multiple": None}, 8), ({}, 1), (None, 1),
    ({"_target_": "genmodels.data.shards.Shards", "former": 1}, 2), ({"_target_": "mine.Data"}, 1),
])  # fmt: skip
def test_lengths_are_multiples_of_a_number_that_the_data_state(data, expected):
    """Checkpoints of earlier versions; in others the statistics do, also of shards."""
    assert length_multiple({"data": {"mel": {}}, "config": {"data": data}}) == expected
    assert length_multiple({"data": {"statistics": {"multiple": 5}}, "config": {"data": data}}) == 5


@pytest.mark.parametrize("words, said", [
    ([FILES[0], "lm=book.txt"], "give beam=8 too"), ([FILES[0], "lm=nowhere.txt", "beam=2"], "cannot be read"),
    ([FILES[0], "stream=true"], "stream is for"), ([], "name the recordings"),
    ([FILES[0], "stream=true", "lm=book.txt"], "stream takes the best path as it comes: leave lm out"),
    (["${x}.wav"], "${x}.wav: there is no such file"),
    (["nowhere.wav"], "nowhere.wav: there is no such file"),
    ([FILES[0], "files=[a.wav]"], "is named beside files="),
    ([FILES[0], "rescore=true"], "give lm= too"), ([FILES[0], "lm_weight=0"], "lm_weight=0 is for a language model"),
    ([FILES[0], "lm_order=3", "beam=2"], "lm_order=3 is for a language"),
    ([FILES[0], "lm=book.txt", "beam=2", "lm_weight=-1"], "lm_weight must be a finite number from 0"),
    ([FILES[0], "batch_size=0"], "batch_size must be a finite number from 1"),
    ([FILES[0], "beam=100000"], "beam must be a finite number from 1 to 1000"),
    ([FILES[0], "length=2", "beam=2"], "length must be a finite number from 0 to 1"),
    ([FILES[0], "length=0.5"], "compares the texts of a beam search"),
    ([FILES[0], "length=0.5", "beam=2"], "and this model has criterion="), ([""], "name the recordings"),
    ([FILES[0], "nbest=2"], "nbest must lie in 1..beam"), ([FILES[0], "beams=3"], "did you mean 'beam'"),
])  # fmt: skip
def test_a_mistake_is_one_line(words, said, ckpt, capsys):
    assert main(["transcribe", *words, f"ckpt={ckpt}"]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1


def test_each_kind_of_model_names_the_other_command(ckpt, tmp_path, capsys):
    assert main(["sample", f"ckpt={ckpt}"]) == 2
    assert "has no samples: genmodels transcribe" in capsys.readouterr().err
    assert main(["push", f"ckpt={ckpt}", "licence=mit", f"out={tmp_path}/card"]) == 0
    card = (tmp_path / "card" / "README.md").read_text()
    assert "genmodels transcribe ckpt=<this folder> a.wav" in card and "sample" not in card
    other = checkpoint(tmp_path, GlowTTS)
    assert main(["transcribe", f"ckpt={other}", FILES[0]]) == 2
    assert "holds a glow_tts: transcribe is for model=recognizer" in capsys.readouterr().err


def test_a_trained_recogniser_hears_sound_as_transcribe_does(ckpt, tmp_path, capsys):
    recogniser, _ = _recogniser(Request(recognizer=ckpt, device="cpu"), {})
    assert main(["transcribe", f"ckpt={ckpt}", FILES[0]]) == 0
    assert f"{FILES[0]}: {recogniser(*read_wav(FILES[0]))}\n" == capsys.readouterr().out
    assert recogniser.name.startswith("recognizer ")
    with pytest.raises(InputError, match="holds a glow_tts"):
        _recogniser(Request(recognizer=checkpoint(tmp_path, GlowTTS), device="cpu"), {})
    assert isinstance(recogniser(torch.zeros(100), 16000), str)  # less than a frame
    waves = {"model": [torch.zeros(9000), torch.full((9000,), math.nan)]}
    opened = SimpleNamespace(spec=recogniser.model.spec, request=Request(), datamodule=Speech().prepare())
    found = _recognised(opened, ["so it is", "it is"], waves, lambda wave, rate: "so it is")
    assert found.heard == ["so it is", ""] and found.curve[-1].utterances == 2


def test_the_texts_have_bits_given_the_sound(ckpt):
    """Those of the recogniser's own likelihood, item by item; none where a text cannot be said in so few frames."""
    recogniser, _ = _recogniser(Request(recognizer=ckpt, device="cpu"), {})
    batch = Speech().prepare().split("test").__getitems__([0, 1])
    model = recogniser.model
    waves = [read_wav(file)[0] for file in FILES]
    texts = model.said(batch)
    found = recogniser.bits(waves, 22050, texts)
    nats = []
    for wave, text in zip(waves, texts, strict=True):
        tokens = torch.tensor([model.symbols.encode(text)])
        said = TextCondition(tokens, torch.ones(1, 1, tokens.shape[1], dtype=torch.bool))
        nats.append(-float(model.log_likelihood(Batch(log_mel(wave)[None], said)).nats))
    assert found == pytest.approx(sum(nats) / sum(map(len, texts)) / math.log(2), rel=1e-6)
    assert found != pytest.approx(recogniser.bits(waves, 22050, texts[::-1]), rel=1e-4)
    assert recogniser.bits(waves, 22050, [texts[0], 200 * "too long "]) is None
    assert recogniser.bits([waves[0], waves[1] * math.nan], 22050, texts) is None


def test_a_recogniser_of_phonemes_does_not_judge_words(tmp_path, monkeypatch):
    path = checkpoint(tmp_path, lambda spec, encoder, **options: Recognizer(spec, **options), net=NET)
    monkeypatch.setattr(Recognizer, "writes_words", False)
    with pytest.raises(InputError, match="writes phonemes, which cannot be compared with words"):
        _recogniser(Request(recognizer=path, device="cpu"), {})


def bits_by_frequency(data) -> float:
    """Bits per character of the test texts by (n_k + s/V)/(n + s), s different characters among n of training."""
    train, test = ([[*row[:count].tolist(), 0] for batch in data.loader(split, 4)
                    for row, count in zip(*characters(batch), strict=True)] for split in ("train", "test"))
    seen, classes = Counter(k for text in train for k in text), len(data.spec.text["symbols"]) - 1
    share = {k: (seen[k] + len(seen) / classes) / (seen.total() + len(seen)) for text in test for k in text}
    return -sum(math.log2(share[k]) for text in test for k in text) / sum(len(text) - 1 for text in test)


def test_an_evaluation_has_bits_and_errors_of_characters(ckpt, tmp_path, capsys):
    out = tmp_path / "report.json"
    assert main(["evaluate", f"ckpt={ckpt}", f"out={out}", "cache=false", "device=cpu", "audit=true", "beam=2"]) == 0
    printed = capsys.readouterr().out
    assert "bits/character" in printed and "given the mel" in printed
    assert "CER of 4 recordings, beam 2 search" in printed and "nats/character" in printed
    report = json.loads(out.read_text())
    (line,) = report["likelihood"]
    assert line["unit"] == "bits_per_character" and line["kind"] == "exact" and line["bits_per_dim"] > 0
    assert len(report["transcription"]["heard"]) == 4 and report["transcription"]["curve"][-1]["utterances"] == 4
    known = {reference["name"]: reference for reference in report["references"]}
    assert list(known) == ["1-gram of the training texts", "6-gram of the training texts"]
    assert known["1-gram of the training texts"]["value"] == pytest.approx(bits_by_frequency(Speech().prepare()))
    nats = [row["nats_per_dim"] for row in report["audit"]]
    assert len(nats) == 4 and nats == sorted(nats, reverse=True)
    assert not report["failed"] and {check["status"] for check in report["checks"]} == {"passed"}


def test_an_evaluation_has_the_best_of_a_list_and_a_language_model(ckpt, tmp_path, capsys):
    """The oracle WER against the lists of the search, one by one; with a language model as in transcribe."""
    (tmp_path / "book.txt").write_text("So it is.\n\nIn being comparatively modern.\n")
    run = ["evaluate", f"ckpt={ckpt}", f"out={tmp_path}/report.json", "cache=false", "device=cpu", "beam=4",
           "stages=[likelihood,fidelity]"]
    assert main([*run, "nbest=4"]) == 0
    assert "% of the best of 4 texts)" in capsys.readouterr().out
    found = json.loads((tmp_path / "report.json").read_text())["transcription"]
    model, batch = load_model(located(ckpt))[0], Speech().prepare().split("test").__getitems__([0, 1, 2, 3])
    lists = model.transcribe(batch, Search(beam=4))
    best = [min((word_edits(said, model.written(one)) for one in some), key=lambda e: e.total)
            for said, some in zip(model.said(batch), lists, strict=True)]
    assert found["oracle_wer"] == pytest.approx(pooled(best).rate) and found["nbest"] == 4
    assert found["oracle_wer"] <= found["wer"]
    heard = []
    for more in ([], ["rescore=true"]):
        assert main([*run, f"lm={tmp_path}/book.txt", "lm_weight=2", *more]) == 0
        words = "rescored by" if more else "with"
        assert f"beam 4 search, {words} {tmp_path}/book.txt, weight 2:" in capsys.readouterr().out
        heard.append(json.loads((tmp_path / "report.json").read_text())["transcription"]["heard"])
    language = language_of(model, tmp_path / "book.txt")
    for own, rescore in zip(heard, (False, True), strict=True):
        how = Search(beam=4, language=language, weight=2.0, rescore=rescore)
        assert own == [model.written(one[0]) for one in model.transcribe(batch, how)]
    assert main([*run, f"lm={tmp_path}/book.txt", "lm_order=2", "lm_weight=2"]) == 0
    language = language_of(model, tmp_path / "book.txt", 2)
    found = json.loads((tmp_path / "report.json").read_text())["transcription"]["heard"]
    assert found == [model.written(one[0]) for one in model.transcribe(batch, Search(
        beam=4, language=language, weight=2.0))]  # fmt: skip
    for words, said in ((["nbest=5"], "nbest must lie in 1..beam"), (["rescore=true"], "give lm= too"),
                        (["length=0.5"], "and this model has criterion=ctc")):
        assert main([*run, *words]) == 2 and said in capsys.readouterr().err
