"""Folders of images: every kind of file that people have, classes, splits, and what is said about broken ones."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import warnings
import weakref

import numpy as np
import pytest
import torch
from PIL import Image

from genmodels.core.errors import InputError, RunError
from genmodels.data import image_folder
from genmodels.data.image_folder import INDEX_NAME, ImageFolder, decode, find_problems, image_files


def picture(number: int, size=(12, 10)) -> Image.Image:
    """A picture that differs for every number."""
    rng = np.random.default_rng(number)
    return Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def test_images_are_decoded_once_for_their_problems_and_their_splits(folder, monkeypatch):
    decoded = []
    monkeypatch.setattr(image_folder, "decode", lambda file, *rest: decoded.append(file) or decode(file, *rest))
    module = ImageFolder(root=str(folder), size=8)
    assert module.problems() == [] and len(module.split("train")) == 24
    assert len(decoded) == len(set(decoded)) == 30


@pytest.fixture
def folder(tmp_path):
    """Thirty pictures in two classes."""
    root = tmp_path / "pets"
    for number in range(30):
        place = root / ("cat" if number % 3 else "dog") / f"{number:02d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(place)
    return root


def _plain(rgb) -> Image.Image:
    return Image.new("RGB", (6, 6), rgb)


def _palette() -> Image.Image:
    return _plain((200, 10, 30)).quantize(4)


def _palette_with_hole() -> Image.Image:
    image = Image.new("P", (6, 6), 1)
    image.putpalette([9, 9, 9, 200, 10, 30])
    image.info["transparency"] = 0
    image.paste(0, (0, 0, 6, 3))
    return image


def _wide(value: int) -> Image.Image:
    return Image.fromarray(np.full((6, 6), value, dtype=np.uint16))


# name: (what is saved, options of save, the colour that the upper left and lower right pixels must have)
ZOO = {
    "rgb.png": (_plain((200, 10, 30)), {}, (200, 10, 30), (200, 10, 30)),
    "palette.png": (_palette(), {}, (200, 10, 30), (200, 10, 30)),
    "palette_hole.png": (_palette_with_hole(), {"transparency": 0}, (255, 255, 255), (200, 10, 30)),
    "palette.gif": (_palette(), {}, (200, 10, 30), (200, 10, 30)),
    "grey.png": (Image.new("L", (6, 6), 77), {}, (77, 77, 77), (77, 77, 77)),
    "one_bit.png": (Image.new("1", (6, 6), 1), {}, (255, 255, 255), (255, 255, 255)),
    "transparent.png": (Image.new("RGBA", (6, 6), (200, 10, 30, 0)), {}, (255, 255, 255), (255, 255, 255)),
    "half.png": (Image.new("RGBA", (6, 6), (200, 10, 30, 51)), {}, (244, 206, 210), (244, 206, 210)),
    "grey_alpha.png": (Image.new("LA", (6, 6), (100, 255)), {}, (100, 100, 100), (100, 100, 100)),
    "colour_key.png": (_plain((200, 10, 30)), {"transparency": (200, 10, 30)}, (255, 255, 255), (255, 255, 255)),
    "sixteen.png": (_wide(257 * 77), {}, (77, 77, 77), (77, 77, 77)),
    "sixteen_hole.png": (_wide(257 * 77), {"transparency": 257 * 77}, (255, 255, 255), (255, 255, 255)),
    "sixteen_white.tif": (_wide(65535), {}, (255, 255, 255), (255, 255, 255)),
    "sixteen_white_is_0.tif": (_wide(257 * 55), {"tiffinfo": {262: 0}}, (200, 200, 200), (200, 200, 200)),
    "cmyk.tif": (Image.new("CMYK", (6, 6), (0, 255, 255, 0)), {}, (255, 0, 0), (255, 0, 0)),
    "cmyk.jpg": (Image.new("CMYK", (6, 6), (0, 255, 255, 0)), {"quality": 100}, (255, 0, 0), (255, 0, 0)),
    "ycbcr.jpg": (_plain((200, 10, 30)).convert("YCbCr"), {"quality": 100}, (200, 10, 30), (200, 10, 30)),
    "photo.JPEG": (_plain((200, 10, 30)), {"quality": 100}, (200, 10, 30), (200, 10, 30)),
    "page.webp": (_plain((200, 10, 30)), {"lossless": True}, (200, 10, 30), (200, 10, 30)),
    "süß 写真.bmp": (_plain((200, 10, 30)), {}, (200, 10, 30), (200, 10, 30)),
}


@pytest.mark.parametrize("name", ZOO)
def test_every_mode_becomes_the_colour_that_one_sees(name, tmp_path):
    image, options, upper, lower = ZOO[name]
    image.save(tmp_path / name, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = decode(tmp_path / name, 6, 3)
        grey = decode(tmp_path / name, 6, 1)
    assert x.shape == (3, 6, 6) and x.dtype == torch.uint8 and grey.shape == (1, 6, 6)
    tolerance = 3 if name.lower().endswith(("jpg", "jpeg")) else 1
    for at, colour in ((x[:, 0, 0], upper), (x[:, -1, -1], lower)):
        assert (at.int() - torch.tensor(colour)).abs().max() <= tolerance


def test_grey_of_twelve_bits_is_scaled_by_its_largest_value(tmp_path):
    packed = b"\xff\xff\xff" * 8 + b"\x80\x08\x00" * 8  # two values of three hex digits: 0xfff, and 0x800
    tags = ((256, 8), (257, 4), (258, 12), (259, 1), (262, 1), (273, 8), (277, 1), (278, 4), (279, len(packed)))
    entries = b"".join(struct.pack("<HHII", tag, 3 if tag != 273 else 4, 1, value) for tag, value in tags)
    (tmp_path / "a.tif").write_bytes(b"II*\0" + struct.pack("<I", 8 + len(packed)) + packed
                                     + struct.pack("<H", len(tags)) + entries + b"\0" * 4)
    x = decode(tmp_path / "a.tif", 4, 1)
    assert x[0, 0].tolist() == [255] * 4 and x[0, 3, 0] == 128


def test_images_of_the_right_size_are_untouched_and_orientation_is_honoured(tmp_path):
    truth = torch.from_numpy(np.array(picture(3, (8, 8)))).permute(2, 0, 1)
    picture(3, (8, 8)).save(tmp_path / "a.png")
    assert torch.equal(decode(tmp_path / "a.png", 8, 3), truth)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: shown rotated by 90 degrees clockwise
    picture(3, (8, 8)).save(tmp_path / "turned.png", exif=exif)
    assert torch.equal(decode(tmp_path / "turned.png", 8, 3), truth.rot90(-1, (1, 2)))


def test_the_shorter_side_is_resized_and_the_middle_kept(tmp_path):
    wide = np.zeros((10, 40, 3), dtype=np.uint8)
    wide[:, 15:25] = 255  # the middle square
    Image.fromarray(wide).save(tmp_path / "wide.png")
    assert (decode(tmp_path / "wide.png", 5, 3)[:, :, 1:-1] > 250).all()
    Image.fromarray(wide.transpose(1, 0, 2)).save(tmp_path / "tall.png")
    assert (decode(tmp_path / "tall.png", 5, 3)[:, 1:-1] > 250).all()


BROKEN = {
    "truncated.png": "truncated",
    "truncated.jpg": "truncated",
    "zero.png": "empty file",
    "text.png": "not an image",
    "animated.gif": "holds 3 frames",
    "float.tif": "no known range",
}


def _break(root) -> None:
    rng = np.random.default_rng(1)
    noise = Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    for name in ("truncated.png", "truncated.jpg"):
        noise.save(root / name)
        content = (root / name).read_bytes()
        (root / name).write_bytes(content[: len(content) // 2])
    (root / "zero.png").write_bytes(b"")
    (root / "text.png").write_text("these are not pixels\n")
    frames = [_plain((k, k, k)) for k in (0, 100, 200)]
    frames[0].save(root / "animated.gif", save_all=True, append_images=frames[1:])
    Image.fromarray(np.ones((6, 6), dtype=np.float32)).save(root / "float.tif")


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_all_broken_images_are_found_before_training(folder, cache, refuses):
    _break(folder / "cat")
    module = ImageFolder(root=str(folder), size=8, cache=cache)
    message = refuses(InputError, None, module.prepare)
    assert f"6 of 36 images in {folder}" in message and "data.skip_bad=true" in message
    problems = module.problems()
    assert len(problems) == 6
    for name, reason in BROKEN.items():
        assert f"cat{os.sep}{name}" in message
        assert any(name in line and reason in line for line in problems), (name, problems)


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_broken_images_can_be_left_out_with_one_warning(folder, cache):
    clean = ImageFolder(root=str(folder), size=8, cache=cache).prepare()
    _break(folder / "cat")
    module = ImageFolder(root=str(folder), size=8, cache=cache, skip_bad=True)
    with pytest.warns(UserWarning, match="left out 6 of 36 images") as caught:
        module.prepare()
    assert len(caught) == 1
    for split in ("train", "val", "test"):
        pair = [next(iter(m.loader(split, 100))) for m in (clean, module)]
        assert torch.equal(pair[0].x, pair[1].x) and torch.equal(pair[0].cond, pair[1].cond)


def test_many_broken_images_are_counted(folder):
    for number in range(14):
        (folder / "dog" / f"bad{number:02d}.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"14 of 44 images .*bad09.png' \(empty file\) and 4 more; repair"):
        ImageFolder(root=str(folder)).prepare()


def test_decoding_late_serves_what_decoding_early_does(folder):
    early, late = (ImageFolder(root=str(folder), size=8, cache=cache).prepare() for cache in ("memory", "none"))
    assert early.spec == late.spec
    for split in ("train", "val", "test"):
        for a, b in zip(early.loader(split, 7), late.loader(split, 7), strict=True):
            assert torch.equal(a.x, b.x) and torch.equal(a.cond, b.cond) and torch.equal(a.index, b.index)


def test_large_folders_are_decoded_late(folder, monkeypatch):
    monkeypatch.setattr(image_folder, "_MEMORY", 30 * 3 * 64 - 1)
    assert type(ImageFolder(root=str(folder), size=8).prepare().split("train")).__name__ == "FileData"
    monkeypatch.setattr(image_folder, "_MEMORY", 30 * 3 * 64)
    assert type(ImageFolder(root=str(folder), size=8).prepare().split("train")).__name__ == "TensorData"


def test_examining_a_folder_holds_few_images_at_once(folder, monkeypatch):
    real, made, most = image_folder.try_decode, [], [0]

    def counting(*args):
        x = real(*args)
        made.append(weakref.ref(x))
        most[0] = max(most[0], sum(one() is not None for one in made))
        return x

    monkeypatch.setattr(image_folder, "try_decode", counting)
    assert find_problems(folder, image_files(folder), 8, 3) == {} and len(made) == 30
    assert most[0] <= image_folder._THREADS + 1


def test_what_was_examined_is_remembered_until_a_file_changes(folder, monkeypatch):
    files, looked = image_files(folder), []
    real = image_folder.find_problems.__globals__["try_decode"]

    def counting(path, size, channels):
        looked.append(path.name)
        return real(path, size, channels)

    monkeypatch.setitem(image_folder.find_problems.__globals__, "try_decode", counting)
    assert find_problems(folder, files, 8, 3) == {} and len(looked) == 30
    looked.clear()
    assert find_problems(folder, files, 8, 3) == {} and looked == []
    (folder / files[4]).write_bytes(b"")
    assert find_problems(folder, files, 8, 3) == {files[4]: "empty file"} and len(looked) == 1
    (folder / INDEX_NAME).write_text("{ not json")
    assert find_problems(folder, files, 8, 3) == {files[4]: "empty file"} and len(looked) == 31
    assert json.loads((folder / INDEX_NAME).read_text())["files"][files[4]][3] == "empty file"
    looked.clear()
    assert find_problems(folder, files, 8, 1) == {files[4]: "empty file"} and len(looked) == 30  # read in other colours


def test_the_index_moves_to_the_cache_where_the_folder_cannot_be_written(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("GENMODELS_CACHE", str(tmp_path / "cache"))
    (folder / INDEX_NAME).mkdir()  # cannot be replaced by a file, whoever runs this
    assert find_problems(folder, image_files(folder), 8, 3) == {}
    assert len(list((tmp_path / "cache").glob("index-*.json"))) == 1
    assert not [p for p in folder.iterdir() if p.is_file()]


def test_an_index_that_something_else_wrote_is_written_anew(folder):
    files = image_files(folder)
    (folder / files[4]).write_bytes(b"")
    place, entry = folder / INDEX_NAME, list(range(3))
    wrong = [None, [], 3, {"format": 1}, {"format": 1, "files": []}, {"format": 1, "files": {files[0]: 3}},
             {"format": 1, "files": {files[0]: None}}, {"format": 1, "files": {files[0]: []}},
             {"format": 1, "files": {files[0]: [*image_folder._stamp(folder / files[0]), entry]}},
             {"format": 1, "files": {files[0]: image_folder._stamp(folder / files[0])}}]
    for content in [*map(json.dumps, wrong), "[" * 100_000, "\0", "{" * 9]:
        place.write_text(content)
        assert find_problems(folder, files, 8, 3) == {files[4]: "empty file"}
        assert set(json.loads(place.read_text())["files"]) == set(files)
    place.unlink()
    os.mkfifo(place)
    assert find_problems(folder, files, 8, 3) == {files[4]: "empty file"}


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_what_is_no_file_is_not_waited_for(folder, cache):
    os.mkfifo(folder / "cat" / "pipe.png")
    (folder / "cat" / "nested.png").mkdir()
    os.symlink("/dev/zero", folder / "cat" / "device.png")
    os.symlink(folder / "nowhere", folder / "cat" / "gone.png")
    held = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(folder / "cat")  # the path of a socket is short
    held.bind("socket.png")
    os.chdir(here)
    problems = ImageFolder(root=str(folder), size=8, cache=cache).problems()
    held.close()
    said = {os.path.basename(line.split(": ")[0]): line for line in problems}
    assert sorted(said) == ["device.png", "gone.png", "pipe.png", "socket.png"]
    assert all(f"is a {name}, not a file" in said[f"{name}.png"] for name in ("pipe", "socket", "device"))


def test_an_image_that_breaks_during_training_is_named(folder):
    module = ImageFolder(root=str(folder), size=8, cache="none").prepare()
    data = module.split("train")
    (folder / data.files[2]).write_bytes(b"")
    with pytest.raises(RunError, match=f"{os.path.basename(data.files[2])} can no longer be read: empty"):
        data.__getitems__([1, 2])


@pytest.mark.parametrize("given", [False, True])
def test_the_first_held_out_images_are_of_every_class(tmp_path, given):
    """So that validation and evaluation on the first items are not of the first classes, in whose order files are."""
    for name in ("a", "b", "c"):
        for k in range(40):
            place = tmp_path / (("train", "val", "test")[k % 3] if given else "") / name
            place.mkdir(parents=True, exist_ok=True)
            picture(k).save(place / f"{k}.png")
    module = ImageFolder(root=str(tmp_path), size=8, val_fraction=0.3, test_fraction=0.3).prepare()
    for split in ("val", "test"):
        assert len(next(iter(module.loader(split, 10))).cond.unique()) == 3
        again = ImageFolder(root=str(tmp_path), size=8, val_fraction=0.3, test_fraction=0.3).prepare()
        assert torch.equal(module.items(split).x, again.items(split).x)
    assert module.items("train").cond.diff().min() >= 0  # in the order of their files


def test_classes_come_from_folders(folder, capsys):
    module = ImageFolder(root=str(folder), size=8).prepare()
    assert (module.spec.num_classes, module.spec.class_names, module.spec.name) == (2, ("cat", "dog"), "pets")
    labels = torch.cat([b.cond for s in ("train", "val", "test") for b in module.loader(s, 64)])
    assert labels.bincount().tolist() == [20, 10]
    assert [len(module.split(s)) for s in ("train", "val", "test")] == [24, 3, 3]
    deep = folder / "cat" / "black" / "old"
    deep.mkdir(parents=True)
    picture(99).save(deep / "x.png")
    assert ImageFolder(root=str(folder), size=8).prepare().spec.class_names == ("cat", "dog")
    picture(98).save(folder / "stray.png")  # an image of no class: there are no classes
    assert capsys.readouterr().out == ""
    assert ImageFolder(root=str(folder), size=8).prepare().spec.num_classes is None
    assert "no classes: 1 of 32 images, such as 'stray.png', are in no class folder" in capsys.readouterr().out


def test_one_folder_is_no_class_and_other_files_do_not_matter(tmp_path):
    root = tmp_path / "holiday"
    (root / "beach").mkdir(parents=True)
    for number in range(20):
        picture(number).save(root / "beach" / f"{number}.png")
    (root / "notes.txt").write_text("sunny")
    (root / ".hidden.png").write_bytes(b"")
    (root / "__MACOSX").mkdir()
    (root / "__MACOSX" / "1.png").write_bytes(b"")
    os.symlink(root, root / "beach" / "loop")
    module = ImageFolder(root=str(root), size=8, channels=1).prepare()
    assert (module.spec.num_classes, module.spec.event_shape) == (None, (1, 8, 8))
    assert sum(len(module.split(s)) for s in ("train", "val", "test")) == 20


def test_a_folder_that_cannot_be_read_is_not_passed_over(folder, monkeypatch):
    real = os.scandir

    def scandir(place):
        if os.path.basename(place) in ("dog", "lost+found"):
            raise PermissionError(errno.EACCES, "Permission denied", place)
        return real(place)

    (folder / "lost+found").mkdir()  # of every disk, and of its owner alone
    assert len(image_files(folder)) == 30
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InputError, match="pets/dog cannot be read .Permission denied.: make it readable"):
        ImageFolder(root=str(folder)).prepare()


def test_a_folder_comes_before_links_to_it(tmp_path):
    for name in "bd":
        (tmp_path / name).mkdir()
        picture(3).save(tmp_path / name / "1.png")
    for link, to in (("a", "b"), ("c", "d"), ("e", "b")):
        os.symlink(tmp_path / to, tmp_path / link)
    assert image_files(tmp_path) == ["b/1.png", "d/1.png"]


def test_sixteen_bits_of_a_grey_map(tmp_path):
    for most in (65535, 1023):
        levels = np.array([[0, most // 3], [most // 2, most]], dtype=">u2")
        (tmp_path / "grey.pgm").write_bytes(f"P5 2 2 {most}\n".encode() + levels.tobytes())
        found = decode(tmp_path / "grey.pgm", 2, 1)[0].double()
        assert (found - torch.from_numpy(levels.astype(float)) * 255 / most).abs().max() <= 0.51


@pytest.mark.parametrize("stray", ["extra/0.png", "cover.png", "extra/a/0.png"])
def test_what_lies_beside_given_splits_is_refused(tmp_path, stray, refuses):
    """It would turn the splits into classes, and mix them."""
    for number, name in enumerate(["train/a/0.png", "train/b/1.png", "test/a/2.png", "test/b/3.png", stray]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        picture(number, (8, 8)).save(tmp_path / name)
    said = f"'{stray.split('/')[0]}' lies next to the folders of the splits .test, train."
    refuses(InputError, said, ImageFolder(root=str(tmp_path), size=8).prepare)


@pytest.mark.parametrize("split", ["train", "Test"])
def test_what_lies_beside_a_single_split_is_refused(tmp_path, split, refuses):
    for number, name in enumerate([f"{split}/a/0.png", f"{split}/b/1.png", "extra/2.png"]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        picture(number, (8, 8)).save(tmp_path / name)
    said = f"'extra' lies next to the folders of the splits .{split}."
    refuses(InputError, said, ImageFolder(root=str(tmp_path), size=8).prepare)


def test_a_class_of_trains(tmp_path):
    for number in range(20):
        file = tmp_path / ("plane", "train")[number % 2] / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        picture(number, (8, 8)).save(file)
    module = ImageFolder(root=str(tmp_path), size=8)
    assert module.prepare().spec.class_names == ("plane", "train")


@pytest.mark.parametrize("names", [("train", "val", "test"), ("train", "valid"), ("train", "dev"),
                                   ("Training", "Testing")])
@pytest.mark.parametrize("cache", ["memory", "none"])
def test_given_splits_are_honoured(tmp_path, names, cache):
    owner = {}
    for number in range(60):
        part = names[number % len(names)]
        place = tmp_path / "set" / part / "ab"[number % 4 // 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        picture(number, (8, 8)).save(place)
        key = torch.from_numpy(np.array(picture(number, (8, 8)))).permute(2, 0, 1).numpy().tobytes()
        owner[key] = {"valid": "val", "dev": "val", "Training": "train", "Testing": "test"}.get(part, part)
    module = ImageFolder(root=str(tmp_path / "set"), size=8, cache=cache).prepare()
    assert module.spec.class_names == ("a", "b")
    total = 0
    for split in ("train", "val", "test"):
        for batch in module.loader(split, 64):
            total += len(batch)
            given = {owner[x.numpy().tobytes()] for x in batch.x}
            assert given == {split if split in owner.values() else "train"}
    assert total == 60


def test_a_class_may_be_called_test(tmp_path):
    for number in range(40):
        place = tmp_path / ("train", "plane", "test")[number % 3] / f"{number}.png"
        place.parent.mkdir(exist_ok=True)
        picture(number).save(place)
    assert ImageFolder(root=str(tmp_path), size=8).prepare().spec.class_names == ("plane", "test", "train")


def test_missing_and_empty_folders(tmp_path, refuses):
    def line(path, **options):
        return refuses(InputError, None, ImageFolder(root=str(path), **options).prepare)

    assert f"data.root={tmp_path / 'none'} does not exist" in line(tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "is not a folder" in line(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("")
    assert f"no images below data.root={tmp_path / 'empty'} (looked for" in line(tmp_path / "empty")
    (tmp_path / "empty" / "a.png").write_bytes(b"")
    with pytest.warns(UserWarning, match="left out 1 of 1"):
        assert "none of the images" in line(tmp_path / "empty", skip_bad=True)
    (tmp_path / "few").mkdir()
    picture(0).save(tmp_path / "few" / "a.png")
    assert "split is empty" in line(tmp_path / "few")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"size": 0}, "data.size must be at least 1"),
        ({"channels": 4}, "data.channels must be one of 1, 3"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "must be >= 0 with a sum below 1"),
        ({"cache": "disk"}, "data.cache must be one of auto, memory, none"),
    ],
)
def test_bad_options(options, says):
    with pytest.raises(InputError, match=says):
        ImageFolder(root=".", **options)


def test_a_size_beyond_the_memory_is_refused_before_anything_is_decoded(folder, monkeypatch):
    monkeypatch.setattr(image_folder, "decode", None)
    with pytest.raises(InputError, match=r"data.size=100000: 64 images at once would take 7,680 GB of \d+ GB of"):
        ImageFolder(root=str(folder), size=100_000).setup()


def test_a_lone_training_folder_keeps_its_classes(tmp_path):
    for number, name in enumerate(["cats", "dogs"] * 10):
        place = tmp_path / "train" / name
        place.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(place / f"{number}.png")
    data = ImageFolder(root=str(tmp_path), size=8).prepare()
    assert data.spec.class_names == ("cats", "dogs") and len(data.split("test")) > 0
    assert sum(len(data.split(name)) for name in ("train", "val", "test")) == 20
