"""`genmodels sample` from one small checkpoint: guidance, inpainting, editing and interpolation."""

from __future__ import annotations

import ast
import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import wavfile

import genmodels as gm
from genmodels.cli.main import main
from genmodels.cli.sample import check_replaced, default_target, run
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, RunError
from genmodels.core.samples import SamplingOptions
from genmodels.data.arrays import Arrays
from genmodels.data.base import SPLITS
from genmodels.data.speech import Speech
from genmodels.data.vision import Digits
from genmodels.evaluation.samples import check_target, save_png, write_samples
from genmodels.models.base import Samples
from genmodels.models.ddpm import DDPM
from genmodels.plots.images import has_picture, images_of
from tests.untrained import digits_ddpm, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the checkpoint of a network that is not trained, and a mask whose left half is white."""
    folder = tmp_path_factory.mktemp("run")
    write(digits_ddpm(num_steps=20), folder / "best.ckpt")
    pixels = np.zeros((32, 32), dtype=np.uint8)
    pixels[:, :16] = 255
    Image.fromarray(pixels).save(folder / "mask.png")
    return folder


def test_inpainting_of_a_mel_counts_its_own_frames(tmp_path, capsys):
    generator = np.random.default_rng(0)
    for label in range(2):
        for take in range(6):
            sound = generator.normal(size=128 * (21 + 10 * (take % 2))) / 10
            (tmp_path / "sounds" / str(label)).mkdir(parents=True, exist_ok=True)
            wavfile.write(tmp_path / "sounds" / str(label) / f"{take}.wav", 8000, sound.astype("float32"))
    options = {"layout": "folder", "root": str(tmp_path / "sounds"), "val_fraction": 0.2, "test_fraction": 0.3,
               "mel": {"sample_rate": 8000, "n_fft": 512, "hop": 128, "f_max": 4000.0, "n_mels": 8}}
    data = Speech(**options).prepare()
    torch.manual_seed(0)
    model = DDPM(data.spec, net={"channels": 8, "multipliers": [1], "blocks": 1}, num_steps=20)
    model.run_config = {"data": {"_target_": "genmodels.data.speech.Speech", **options}}
    write(model, tmp_path / "best.ckpt")
    lengths = [int(batch.mask.sum()) for batch in data.loader("test", 1)]
    number, whole = int(np.argmin(lengths)), data.spec.event_shape[1]
    frames = lengths[number]
    assert frames < whole
    run(ckpt=str(tmp_path), inpaint=number, mask="2:5", n=2, steps=2, rounds=1, out=str(tmp_path / "in.npz"))
    assert f"kept {frames - 3} of {frames} frames of item {number}, all but 2:5" in capsys.readouterr().out
    made = json.loads(str(np.load(tmp_path / "in.npz")["made"]))
    assert made["kept"] == 8 * (frames - 3) and made["lengths"] == [frames]
    with pytest.raises(InputError, match=f"within 0:{frames}"):
        run(ckpt=str(tmp_path), inpaint=number, mask=f"2:{frames + 1}", n=1, out=str(tmp_path / "b.npz"))


def item(number):
    return next(iter(Digits().prepare().loader("test", 1, [number]))).x[0].numpy()


def test_inpainting_keeps_what_the_mask_shows_white(folder, capsys):
    out = folder / "in.npz"
    run(ckpt=str(folder), inpaint=3, mask=str(folder / "mask.png"), n=3, steps=4, rounds=2, out=str(out))
    x = np.load(out)["x"]
    assert (x[:, :, :, :4] == item(3)[None, :, :, :4]).all() and (x[:, :, :, 4:] != item(3)[None, :, :, 4:]).any()
    assert "kept 32 of 64 pixels of item 3" in capsys.readouterr().out and "cond" not in np.load(out)
    picture = folder / "in.png"
    run(ckpt=str(folder), inpaint=3, mask=str(folder / "mask.png"), n=2, steps=4, rounds=2, cond=7, out=str(picture))
    with Image.open(picture) as image:
        stored = {key.removeprefix("genmodels."): value for key, value in image.text.items()}
    assert stored["sampler"] == "ddpm" and stored["rounds"] == "2"
    assert stored["inpaint"] == "3" and stored["cond"] == "[7]"
    with Image.open(picture) as image:  # the original and the mask stand over the samples
        pixels = np.asarray(image)
    shown = np.asarray(images_of(torch.from_numpy(item(3))[None], Digits().prepare().spec, 64)[0])
    assert (pixels[18:82, 3:67] == shown).all()
    assert (pixels[18:82, 71:103] == 255).all() and (pixels[18:82, 103:135] == 0).all()


def test_a_grid_carries_its_guidance_and_its_classes(folder):
    out = folder / "guided.png"
    options = {"guidance": 2.0, "guidance_interval": [-4.0, 8.0], "guidance_rescale": 0.5}
    run(ckpt=str(folder), n=4, start=1, cond=[3, 8], steps=2, out=str(out), **options)
    with Image.open(out) as image:
        stored = {key.removeprefix("genmodels."): value for key, value in image.text.items()}
    assert {key: ast.literal_eval(stored[key]) for key in options} == options
    assert stored["cond"] == "[3, 8]" and stored["index"] == "1-4"


def test_a_picture_file_is_an_item_too(folder):
    Image.fromarray((item(5)[0].astype(np.float32) * 255 / 16).round().astype(np.uint8)).save(folder / "five.png")
    out = [folder / f"{k}.npz" for k in range(2)]
    for named, place in zip((5, str(folder / "five.png")), out, strict=True):
        run(ckpt=str(folder), edit=named, strength=0.3, n=2, seed=4, out=str(place))
    first, second = (np.load(place)["x"] for place in out)
    assert (first == second).all() and np.abs(first.astype(int) - item(5)[None]).mean() < 8
    model = gm.load(folder)
    model.sample(1, inpaint=folder / "five.png", mask=str(folder / "mask.png"), steps=2, rounds=1, progress=False)


def test_samples_are_addressable(folder):
    ways = {
        "guided": {"guidance": 3.0, "guidance_interval": [-4.0, 8.0]},
        "edited": {"edit": 3, "strength": 0.5, "cond": 8, "guidance": 2.0},
        "inpainted": {"inpaint": 3, "mask": str(folder / "mask.png"), "rounds": 2},
    }
    for way, options in ways.items():
        for name, place in (("all", {"n": 7, "batch_size": 3}), ("one", {"n": 1, "start": 5})):
            run(ckpt=str(folder), steps=4, out=str(folder / f"{way}-{name}.npz"), **place, **options)
        whole, alone = (np.load(folder / f"{way}-{name}.npz")["x"].astype(int) for name in ("all", "one"))
        assert np.abs(whole[5] - alone[0]).max() <= 1 and (whole[5] == alone[0]).mean() > 0.98


def test_the_way_between_two_items(folder, capsys):
    run(ckpt=str(folder), interpolate=[3, 17], frames=4, out=str(folder / "strip.png"))
    assert "4 pictures from item 3 to item 17: " in capsys.readouterr().out
    with Image.open(folder / "strip.png") as image:
        assert image.width > 3 * image.height
    for options in ({}, {"frames": 2}, {"frames": 2, "ema": False}):
        run(ckpt=str(folder), interpolate=[3, 17], **options)
    names = sorted(path.name for path in (folder / "samples").glob("*between*"))
    assert names == [f"best_between-3-17{words}.png" for words in ("", "_frames-2", "_frames-2_ema-False")]


def test_the_strip_between_pictures_of_long_names_has_a_short_one(folder, capsys):
    place = folder / ("a" * 120) / ("b" * 120) / "c.png"
    place.parent.mkdir(parents=True)
    Image.new("L", (8, 8)).save(place)
    run(ckpt=str(folder), interpolate=[str(place), 17], frames=2)
    assert "2 pictures from c to item 17: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, said",
    [
        ({"inpaint": 3}, "inpaint=3 needs mask= or text=: give inpaint and one of them"),
        ({"mask": "mask.png"}, "mask=mask.png needs inpaint="),
        ({"strength": 0.5}, "strength=0.5 needs edit="),
        ({"frames": 5}, "frames=5 needs path= or interpolate=: give frames and one of them"),
        ({"rounds": 5}, "rounds=5 needs inpaint="),
        ({"edit": "nowhere.png"}, "edit: there is no file nowhere.png"),
        ({"edit": 3, "strength": 2.0}, "strength = 2.0"),
        ({"guidance": 1e38, "cond": 3}, "guidance must be a finite number .* got 1e[+]38"),
        ({"temperature": float("nan")}, "temperature must be a finite number .* got nan"),
        ({"sampler": "heun", "eta": 0.5}, "eta is an option of sampler=ddim"),
        ({"interpolate": [3, 17], "guidance": 2.0}, "leave out guidance"),
        ({"interpolate": [3, 17], "path": "a.gif"}, "leave out path"),
        ({"path": "a.png", "out": "./a.png"}, "path=a.png names the file of the samples"),
        ({"path": "new/000001.png", "out": "new"}, "path=new/000001.png names the file of a sample in out=new"),
        ({"edit": 3, "guidance": 2.0}, "guidance leads to a class, .*: give cond"),
    ],
)
def test_what_does_not_go_together_is_one_line(folder, options, said):
    with pytest.raises(ValueError, match=said):
        run(ckpt=str(folder), n=2 if "interpolate" not in options else 64, **{"out": None} | options)


@pytest.mark.parametrize("name", ["path.png", "path.gif"])
def test_a_trajectory_replaces_only_trajectories(folder, tmp_path, name):
    for _ in range(2):
        run(ckpt=str(folder), n=2, steps=2, out=str(tmp_path / "x.npz"), path=str(tmp_path / name))
    Image.new("P", (8, 8)).save(tmp_path / f"mine_{name}")
    before = (tmp_path / f"mine_{name}").read_bytes()
    with pytest.raises(InputError, match=f"path=.*mine_{name} exists, is no trajectory and would be replaced"):
        run(ckpt=str(folder), n=2, steps=2, out=str(tmp_path / "x.npz"), path=str(tmp_path / f"mine_{name}"))
    assert (tmp_path / f"mine_{name}").read_bytes() == before


def test_vectors_become_a_table_that_is_read_back(tmp_path):
    spec = DataSpec("people", (3,), num_classes=2, class_names=("a", "b"), columns=("age", "height", "weight"))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-8, 1.0, 1e8])
    samples = Samples(x, torch.tensor([0, 1, 0, 1]), torch.arange(8, 12), {"seed": 3})
    assert default_target(tmp_path / "best.ckpt", SamplingOptions(n=4), spec, {}).suffix == ".csv"
    write_samples(samples, spec, tmp_path / "people.csv")
    lines = (tmp_path / "people.csv").read_text().splitlines()
    assert lines[0] == "age,height,weight,class" and [line[-1] for line in lines[1:]] == ["a", "b", "a", "b"]
    assert json.loads((tmp_path / "people.json").read_text()) == {"seed": 3, "index": "8-11", "cond": [0, 1]}
    write_samples(replace(samples, cond=None), spec, tmp_path / "plain.csv")
    read = Arrays(file=str(tmp_path / "plain.csv"), val_fraction=0.25, test_fraction=0.25).prepare()
    assert read.spec.columns == spec.columns and DataSpec.from_dict(read.spec.to_dict()) == read.spec
    parts = [read.split(name) for name in SPLITS]
    again = torch.cat([part.__getitems__(range(len(part))).x for part in parts])
    assert sorted(again.tolist()) == sorted(x.tolist())
    with pytest.raises(ValueError, match="no table"):
        check_target(tmp_path / "pictures.csv", DataSpec("digits", (1, 8, 8), levels=17))


@pytest.mark.parametrize(("name", "beside"), [("x.txt", "x.json"), ("x.wav", "x.json"), ("x.wav", "x.png")])
def test_the_files_beside_samples_are_not_replaced(tmp_path, name, beside):
    (tmp_path / beside).write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match=f"{name} also writes .*{beside}, which exists"):
        run(ckpt="nothing", out=str(tmp_path / name))


def test_a_record_of_samples_that_were_not_written_is_replaced(tmp_path):
    (tmp_path / "x.json").write_text('{"index": "0-3"}', encoding="utf-8")
    with pytest.raises(RunError, match="nothing: no such checkpoint"):
        run(ckpt="nothing", out=str(tmp_path / "x.wav"))


def test_the_files_beside_a_table_are_not_replaced(tmp_path):
    main(["train", "model=nsf", "data=toy", f"run_dir={tmp_path / 'run'}", "trainer.max_steps=1", "logger=csv"])
    (tmp_path / "x.json").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match=r"x.csv also writes .*x.json, which exists"):
        run(ckpt=str(tmp_path / "run"), n=2, out=str(tmp_path / "x.csv"))
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == "mine"
    for _ in range(2):  # one's own are
        run(ckpt=str(tmp_path / "run"), n=2, out=str(tmp_path / "y.csv"))
    assert "sampler" in (tmp_path / "y.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("options", [{"size": [100_000, 100_000]}, {"size": [100_000, 100_000], "n": 1}])
def test_sizes_beyond_any_memory_are_refused_at_once(folder, options, tmp_path):
    with pytest.raises(InputError, match=r"at once would take [\d,]+ GB or more: lower batch_size, or size=\[100000"):
        run(ckpt=str(folder), out=str(tmp_path / "x.npz"), steps=1, **options)


def test_a_pipe_is_no_picture_to_wait_for(folder, tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(InputError, match="edit: .*pipe.png is a pipe, not a picture"):
        run(ckpt=str(folder), edit=str(tmp_path / "pipe.png"), n=1, steps=1, out=str(tmp_path / "x.npz"))


def test_many_options_make_no_name_that_is_too_long(tmp_path):
    spec, asked = DataSpec("digits", (1, 8, 8), levels=17), SamplingOptions(n=4)
    options = {"guidance": 2.5, "spacing": "uniform_log_snr", "inpaint": str(tmp_path / "a" / "half.png")}
    short, long, other = (default_target(tmp_path / "best.ckpt", asked, spec, given) for given in (
        {"guidance": 2.5}, options | {"cond": list(range(99))}, options | {"cond": list(range(1, 100))}))
    assert short.name == "best_seed0_0-3_guidance-2.5.png" and long.name != other.name
    assert max(len(long.name), len(other.name)) < 180


@pytest.mark.parametrize("name", ["mine.npz", "mine.png"])
def test_a_file_of_something_else_is_not_replaced(folder, name, tmp_path):
    place = folder / name
    np.savez(folder / "mine.npz", x=np.zeros(3))
    Image.new("L", (4, 4)).save(folder / "mine.png")
    before = place.read_bytes()
    with pytest.raises(InputError, match=f"{name} exists, is no file of samples and would be replaced"):
        run(ckpt=str(folder), n=1, steps=2, out=str(place))
    assert place.read_bytes() == before
    place.unlink()
    for _ in range(2):  # one's own are
        run(ckpt=str(folder), n=1, steps=2, out=str(place))
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="mine.csv exists, is no file of samples"):
        check_replaced(tmp_path / "mine.csv", DataSpec("table", (2,)), [0])
    (tmp_path / "mine.json").write_text('{"index": [0], "columns": ["a"]}')
    with pytest.raises(InputError, match="mine.csv exists, is no file of samples"):
        check_replaced(tmp_path / "mine.csv", DataSpec("table", (2,)), [0])
    (tmp_path / "mine.json").write_text('{"index": "0-1"}')
    check_replaced(tmp_path / "mine.csv", DataSpec("table", (2,)), [0])


def test_samples_of_four_channels_are_arrays(tmp_path):
    spec, asked = DataSpec("four", (4, 8, 8), levels=256), SamplingOptions(n=4)
    assert default_target(tmp_path / "best.ckpt", asked, spec, {}).suffix == ".npz"
    for name in ("x.png", "x"):
        with pytest.raises(InputError, match=r"samples of shape \(4, 8, 8\) are not pictures"):
            check_target(tmp_path / name, spec)
    save_png(Image.new("L", (14000, 14000)), tmp_path / "own.png", {"index": "0-1"})  # beyond what Pillow opens
    check_replaced(tmp_path / "own.png", DataSpec("digits", (1, 8, 8), levels=17), [0])
    assert not has_picture(spec) and has_picture(replace(spec, event_shape=(3, 8, 8)))


def test_texts_that_differ_by_a_mark_have_names_of_their_own(tmp_path):
    spec = DataSpec("text", (1, 8), levels=256, encoding="utf-8")
    names = {default_target(tmp_path / "best.ckpt", SamplingOptions(n=4), spec, {"inpaint": text, "mask": mask}).name
             for text in ("The __ of!", "The __ of?") for mask in "_?"}
    assert len(names) == 4


def test_text_from_a_file_to_samples_with_gaps_and_a_page(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    folder = tmp_path / "run"
    model = ["model=masked_diffusion", "model.width=4", "model.net.width=16", "model.net.depth=1", "model.net.heads=2"]
    data = ["data=text", f"data.file={tmp_path / 'a.txt'}", "data.length=16", "data.stride=8", "data.batch_size=16"]
    trainer = ["trainer.max_steps=4", "trainer.sample_every_n_steps=4", "trainer.validate_every_n_steps=4"]
    assert main(["train", *model, *data, *trainer, "logger.wandb=off", f"run_dir={folder}"]) == 0
    assert "val/bits_per_character <= " in capsys.readouterr().out
    assert (folder / "samples" / "step_000004.txt").read_text(encoding="utf-8")
    run(ckpt=str(folder), inpaint="the ____k", mask="_", n=2, steps=4, out=str(tmp_path / "in.npz"))
    kept = [bytes(row[:9]) for row in np.load(tmp_path / "in.npz")["x"][:, 0]]
    assert all(text[:4] == b"the " and text[8:] == b"k" and text != b"the ____k" for text in kept)
    run(ckpt=str(folder), inpaint="1984", mask="0:2", n=1, steps=2, out=str(tmp_path / "in.npz"))  # no item's number
    assert bytes(np.load(tmp_path / "in.npz")["x"][0, 0, 2:4]) == b"84"
    assert "bytes of 1984" in capsys.readouterr().out
    run(ckpt=str(folder), inpaint="~/bin ~~", mask="~", n=1, steps=2, out=str(tmp_path / "in.npz"))  # no home folder
    assert bytes(np.load(tmp_path / "in.npz")["x"][0, 0, 1:6]) == b"/bin "
    run(ckpt=str(folder), inpaint=1, mask="3:8", n=2, steps=2, out=str(tmp_path / "texts"))
    single = {path.name for path in (tmp_path / "texts").iterdir()}
    assert single == {"000000.txt", "000001.txt", "made_0-1.json"}
    (tmp_path / "texts" / "000009.txt").write_text("mine")
    for numbers, said in (({"start": 9, "n": 1}, "000009.txt is no sample and would be replaced"),
                          ({"start": 1, "n": 3}, "made_0-1.json says how samples 0 to 1 were made, of which")):
        with pytest.raises(InputError, match=said):
            run(ckpt=str(folder), steps=2, out=str(tmp_path / "texts"), **numbers)
    assert (tmp_path / "texts" / "000009.txt").read_text() == "mine"
    run(ckpt=str(folder), n=3, steps=2, out=str(tmp_path / "texts"))
    assert [path.name for path in (tmp_path / "texts").glob("made_*")] == ["made_0-2.json"]
    run(ckpt=str(folder), n=2, steps=2)
    files = sorted((folder / "samples").glob("best_seed0_0-1_steps-2.*"))
    assert [file.suffix for file in files] == [".json", ".txt"]
    assert files[1].read_text(encoding="utf-8").startswith("--- 0 ---\n")
    with pytest.raises(InputError, match="out=x.png: end it in .txt"):
        run(ckpt=str(folder), n=2, out="x.png")
    stages = "stages=[likelihood,fidelity]"
    assert main(["evaluate", f"ckpt={folder}", "draws=2", "steps=2", stages, f"out={tmp_path / 'e.json'}"]) == 0
    said = capsys.readouterr().out
    assert "bits/character" in said and "frequencies of pairs of bytes" in said and "bits/dim" not in said
    page = next(tmp_path.glob("e*.html")).read_text(encoding="utf-8")
    assert page.count('class="written"') == 8


def test_a_folder_keeps_pictures_that_are_no_samples_and_names_those_of_others(folder, capsys, tmp_path):
    Image.new("L", (4, 4)).save(tmp_path / "000001.png")
    photo = (tmp_path / "000001.png").read_bytes()
    assert main(["sample", f"ckpt={folder}", "n=2", f"out={tmp_path}"]) == 2
    assert "000001.png is no sample and would be replaced: name another folder by out=" in capsys.readouterr().err
    assert (tmp_path / "000001.png").read_bytes() == photo and len(list(tmp_path.iterdir())) == 1
    assert main(["sample", f"ckpt={folder}", "n=1", f"out={tmp_path}"]) == 0  # 000000 alone
    assert "of other samples" not in capsys.readouterr().out
    assert main(["sample", f"ckpt={folder}", "n=3", "seed=1", f"out={tmp_path}/s"]) == 0
    assert main(["sample", f"ckpt={folder}", "n=2", "seed=2", f"out={tmp_path}/s"]) == 0
    assert "1 picture there of other samples, such as 000002.png" in capsys.readouterr().out


def test_the_folder_of_the_shell_is_a_folder_for_samples(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sample", f"ckpt={folder}", "n=2", "out=."]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["000000.png", "000001.png"]
