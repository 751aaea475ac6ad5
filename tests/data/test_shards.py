"""Training on tar shards: sets that others wrote, splits, classes, memory, and what is said about broken ones."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from genmodels.core.errors import InputError, RunError
from genmodels.data.image_folder import decode
from genmodels.data.shard_writer import write_shards
from genmodels.data.shards import RECORD, ShardData, Shards, splits_of
from genmodels.data.tars import write_tar
from genmodels.data.toy import Toy
from genmodels.data.vision import Digits


def image(number: int) -> bytes:
    """A PNG or JPEG that differs for every number, of different extents."""
    rng, file = np.random.default_rng(number), io.BytesIO()
    pixels = rng.integers(0, 256, (9 + number % 3, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG" if number % 2 else "JPEG")
    return file.getvalue()


def array(value) -> bytes:
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


def write(folder, name: str, items: list[dict[str, bytes]]) -> None:
    folder.mkdir(exist_ok=True)
    with open(folder / name, "wb") as file:
        write_tar(file, [(f"{n:05d}", files) for n, files in enumerate(items)])


def pictures(first: int, count: int) -> list[dict[str, bytes]]:
    return [{"png" if n % 2 else "jpg": image(n), "cls": str(n % 3).encode(), "json": b"{}"}
            for n in range(first, first + count)]


@pytest.fixture
def folder(tmp_path):
    """60 pictures in three shards, as somebody else would write them."""
    for number in range(3):
        write(tmp_path / "pets", f"{number:05d}.tar", pictures(20 * number, 20))
    return tmp_path / "pets"


def test_pictures_are_decoded_as_those_of_a_folder(folder):
    data = Shards(root=str(folder), size=8).prepare()
    assert data.spec.event_shape == (3, 8, 8) and data.spec.num_classes == 3 and data.spec.name == "pets"
    assert [len(data.split(s)) for s in ("train", "val", "test")] == [48, 6, 6]
    split = data.split("train")
    batch = split.__getitems__([3, 17])
    for row, position in enumerate((3, 17)):
        number = int(split.rows[position])
        assert torch.equal(batch.x[row], decode(io.BytesIO(image(number)), 8, 3)) and batch.cond[row] == number % 3
    assert Shards(root=str(folder), size=8, channels=1).prepare().spec.event_shape == (1, 8, 8)
    assert data.problems() == []


def test_the_same_pictures_in_other_shards_are_the_same_data(folder, tmp_path):
    """The order of training depends on the order of the items, not on where shards begin."""
    write(tmp_path / "one", "all.tar", pictures(0, 60))
    modules = [Shards(root=str(root), size=8, batch_size=8).prepare() for root in (folder, tmp_path / "one")]
    for ours, theirs in zip(*(one.train_dataloader() for one in modules), strict=True):
        assert torch.equal(ours.x, theirs.x) and torch.equal(ours.cond, theirs.cond)


def test_splits_by_name(tmp_path):
    for name, first, count in (("set-train-0.tar", 0, 20), ("set-validation-0.tar", 20, 4), ("set-test-0.tar", 24, 6)):
        write(tmp_path / "set", name, pictures(first, count))
    data = Shards(root=str(tmp_path / "set"), size=8).prepare()
    assert [len(data.split(s)) for s in ("train", "val", "test")] == [20, 4, 6]
    (tmp_path / "set" / "set-test-0.tar").unlink()
    data = Shards(root=str(tmp_path / "set"), size=8, test_fraction=0.25).prepare()
    assert [len(data.split(s)) for s in ("train", "val", "test")] == [15, 4, 5]
    with pytest.raises(InputError, match="extra-0.tar has no word for its split"):
        splits_of(["train-0.tar", "extra-0.tar", "test-0.tar"])
    assert splits_of(["trainer-0.tar"]) is None and splits_of(["val-0.tar"]) is None
    assert splits_of(["train/0.tar", "valid/0.tar", "test/0.tar"]).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("value", "options", "shape", "levels", "dtype"), [
    (np.arange(6, dtype=np.float64), {}, (6,), None, torch.float32),
    (np.zeros((4, 5), np.uint8), {}, (1, 4, 5), 256, torch.uint8),
    (np.zeros((4, 5, 3), np.uint8), {}, (3, 4, 5), 256, torch.uint8),
    (np.zeros((3, 4, 5), np.float32), {"layout": "nchw"}, (3, 4, 5), None, torch.float32),
    (np.full(3, 9, np.int64), {"levels": 10}, (3,), 10, torch.uint8),
])  # fmt: skip
def test_arrays(value, options, shape, levels, dtype, tmp_path):
    write(tmp_path / "set", "0.tar", [{"npy": array(value)}] * 20)
    data = Shards(root=str(tmp_path / "set"), **options).prepare()
    batch = data.split("train").__getitems__([0, 1])
    assert (data.spec.event_shape, data.spec.levels, data.spec.num_classes) == (shape, levels, None)
    assert batch.x.dtype == dtype and batch.cond is None
    want = np.moveaxis(value, -1, 0) if value.shape == (4, 5, 3) else value.reshape(shape)
    assert np.array_equal(batch.x[1].numpy(), want)


def test_the_chosen_file_is_the_item(tmp_path):
    files = {"png": image(1), "seg.png": image(2), "vec.npy": array(np.arange(4.0)), "id": b"1"}
    write(tmp_path / "set", "0.tar", [files] * 20)
    for options, shape, classes in (({"field": "seg.png", "size": 4}, (3, 4, 4), None),
                                    ({"field": "vec.npy", "label": "id"}, (4,), 2)):
        data = Shards(root=str(tmp_path / "set"), **options).prepare()
        assert (data.spec.event_shape, data.spec.num_classes) == (shape, classes) and data.problems() == []


@pytest.mark.parametrize(("items", "options", "said"), [
    ([{"jpg": image(0)}] * 9, {}, r"data.size is missing: .*set: 00000.jpg is 9 x 12; give the height"),
    ([{"jpg": b"no"}] * 9, {}, "00000.jpg is damaged"),
    ([{"npy": array(np.zeros(2))}] * 9, {"flip": True}, "data.flip=true is for images"),
    ([{"npy": array(np.zeros((3, 4, 5)))}] * 9, {}, "data.layout=nchw"),
    ([{"npy": array(np.array([{}]))}] * 9, {}, "00000.npy cannot be read: Object arrays"),
    ([{"npy": array(np.zeros(2)), "cls": b"1"}] * 8 + [{"npy": array(np.zeros(2))}], {}, "1 of 9 items have no class"),
    ([{"npy": array(np.zeros(2)), "cls": b"900"}] * 9, {}, "the largest class is 900 in 9 items"),
    ([{"txt": b"a"}] * 9, {}, "1 of the shards in .* cannot be used: '0.tar' .item 00000 has no image or array"),
    ([{"npy": array(np.zeros(2))}] * 2, {}, "the val split is empty"),
])  # fmt: skip
def test_what_cannot_be_used_is_one_line_before_training(items, options, said, tmp_path, refuses):
    write(tmp_path / "set", "0.tar", items)
    refuses(InputError, said, Shards(root=str(tmp_path / "set"), **options).prepare)


def test_missing_and_truncated_shards_are_one_line_or_left_out(folder):
    (folder / "00001.tar").unlink()
    (folder / "00002.tar").write_bytes((folder / "00002.tar").read_bytes()[:5000])
    with pytest.raises(InputError, match=r"2 of the shards in .*: '00001.tar' \(it is missing\), '00002.tar' \(it is"):
        Shards(root=str(folder), size=8).prepare()
    with pytest.warns(UserWarning, match="left out 2 shards"):
        data = Shards(root=str(folder), size=8, skip_bad=True).prepare()
    assert sum(len(data.split(s)) for s in ("train", "val", "test")) == 20


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_item_is_one_line_with_its_name(folder, workers, refuses):
    whole = bytearray((folder / "00000.tar").read_bytes())
    with tarfile.open(folder / "00000.tar") as tar:
        member = tar.getmember("00004.jpg")
    whole[member.offset_data : member.offset_data + 20] = b"x" * 20
    (folder / "00000.tar").write_bytes(whole)
    data = Shards(root=str(folder), size=8, num_workers=workers).prepare()
    splits = {s: data.split(s).rows.tolist() for s in ("train", "val", "test")}
    split = next(s for s, rows in splits.items() if 4 in rows)
    said = r"^\S*00000.tar: 00004.jpg: not an image; genmodels doctor lists all"
    refuses(RunError, said, list, data.loader(split, 8))
    assert [line.endswith("00000.tar: 00004.jpg: not an image") for line in data.problems()] == [True]


def test_damaged_items_are_left_out_if_asked(folder, monkeypatch):
    """All are decoded once; the second time it is known which are damaged."""
    write(folder, "00001.tar", [{"png": b"x", "cls": b"1"}, *pictures(20, 20)])

    def left() -> Shards:
        with pytest.warns(UserWarning, match="left out 1 of 61 items"):
            data = Shards(root=str(folder), size=8, skip_bad=True).prepare()
        assert sum(len(data.split(s)) for s in ("train", "val", "test")) == 60
        return data

    assert left().problems() == []
    monkeypatch.setattr(ShardData, "faults", None)
    left()


def test_a_damaged_first_item_is_left_out_but_no_majority(tmp_path):
    good, other = [{"npy": array(np.arange(3.0) + n)} for n in range(20)], {"npy": array(np.zeros(5))}
    write(tmp_path / "set", "0.tar", [{"npy": b"x"}, *good])
    with pytest.raises(InputError, match="00000.npy cannot be read"):
        Shards(root=str(tmp_path / "set")).prepare()
    with pytest.warns(UserWarning, match="left out 1 of 21 items"):
        data = Shards(root=str(tmp_path / "set"), skip_bad=True).prepare()
    assert data.spec.event_shape == (3,)
    write(tmp_path / "odd", "0.tar", [other, *good])
    with pytest.raises(InputError, match=r"20 of 21 items .* the form of the first that can be read: too many"):
        Shards(root=str(tmp_path / "odd"), skip_bad=True).prepare()


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.GNUTYPE_SPARSE])
def test_files_that_a_tar_holds_as_links_are_not_left_out_in_silence(kind, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for n in range(20):
            info = tarfile.TarInfo(f"{n:02d}.png")
            info.size = len(image(1))
            tar.addfile(info, io.BytesIO(image(1)))
        info = tarfile.TarInfo("20.png")
        info.type, info.linkname = kind, "" if kind == tarfile.GNUTYPE_SPARSE else "00.png"
        tar.addfile(info)
    with pytest.raises(InputError, match=r"20.png is a (link: pack it with tar --deref|sparse file: pack it without)"):
        Shards(root=str(tmp_path), size=8).prepare()


def test_classes_without_items_and_patterns_in_folders(tmp_path):
    write(tmp_path / "set", "0.tar", [{"png": image(n), "cls": b"3" if n % 2 else b"0"} for n in range(20)])
    data = Shards(root=str(tmp_path / "set"), size=8).prepare()
    assert any("no training item has class 1, 2 (2 of 4)" in line for line in data.notes())
    with pytest.raises(InputError, match="has a \\* before its last part"):
        Shards(root=str(tmp_path / "s*" / "0.tar"), size=8).prepare()


@pytest.mark.parametrize(("bad", "options", "said"), [
    (np.zeros(3), {}, r"has shape \(3,\), where the others have \(2,\)"),
    (np.array([0, np.inf]), {}, "holds a value that is not finite"),
    (np.array([0, 7]), {"levels": 7}, "holds 7, but there are 7 levels"),
    (np.array([0, -1]), {"levels": 7}, "holds -1, but there are 7 levels"),
    (np.array([0, 5.7]), {"levels": 7}, "holds values of type float64, where the others are integers"),
])  # fmt: skip
def test_arrays_that_differ_from_the_first(bad, options, said, tmp_path):
    good = np.zeros(2, bad.dtype if not options else np.int64)
    write(tmp_path / "set", "0.tar", [{"npy": array(good)}] * 12 + [{"npy": array(bad)}])
    data = Shards(root=str(tmp_path / "set"), **options).prepare()
    with pytest.raises(RunError, match=f"00012.npy: {said}"):
        for split in ("train", "val", "test"):
            list(data.loader(split, 4))
    assert len(data.problems()) == 1


@pytest.fixture
def written(tmp_path):
    """Shards with a record."""
    write_shards(Toy(n_train=50, n_val=7, n_test=7).prepare(), tmp_path / "set", 10, {})
    return tmp_path / "set"


def test_recorded_shards_are_compared_with_their_record(written):
    whole = (written / "train-000002.tar").read_bytes()
    (written / "train-000002.tar").write_bytes(whole[:-512])
    (written / "test-000000.tar").unlink()
    with pytest.raises(InputError, match=r"'test-000000.tar' \(it is missing\), 'train-000002.tar' \(it has 19,968 of"):
        Shards(root=str(written)).prepare()
    (written / RECORD).write_text("{}x")
    with pytest.raises(InputError, match="dataset.json is damaged .*: copy it again"):
        Shards(root=str(written)).prepare()


def test_a_record_without_checksums_and_labels_beyond_the_classes(tmp_path):
    write_shards(Digits().prepare(), tmp_path / "set", 500, {})
    record = json.loads((tmp_path / "set" / RECORD).read_text())
    (tmp_path / "set" / RECORD).write_text(json.dumps(record | {"spec": record["spec"] | {"num_classes": 7}}))
    with pytest.raises(InputError, match="holds classes 0 to 9, of 7: write the shards again"):
        Shards(root=str(tmp_path / "set")).prepare()
    (tmp_path / "set" / RECORD).write_text(json.dumps(record | {"shards": dict.fromkeys(record["shards"], {})}))
    with pytest.raises(InputError, match="dataset.json is damaged .*bytes"):
        Shards(root=str(tmp_path / "set")).prepare()


def test_doctor_compares_checksums(written):
    whole = bytearray((written / "train-000002.tar").read_bytes())
    whole[700] ^= 1
    (written / "train-000002.tar").write_bytes(whole)
    found = Shards(root=str(written)).problems()
    assert found == [f"{written}/train-000002.tar: it is not what was written (checksum)"]


def test_doctor_lists_damaged_vectors(tmp_path):
    """Whose outliers and constant columns it looks for as well."""
    items = [{"npy": array([float(k), float(k % 3)])} for k in range(30)]
    write(tmp_path, "a.tar", [*items[:20], *({"npy": b"no array"} for _ in range(2)), *items[20:]])
    data = Shards(root=str(tmp_path))
    assert len(data.problems()) == 2 and data.warnings() == []


def test_settings_that_contradict_the_items(written, folder, tmp_path):
    with pytest.raises(InputError, match="data.levels=7, but the items of .* have none: leave it out"):
        Shards(root=str(written), levels=7).prepare()
    write(tmp_path / "arrays", "0.tar", [{"npy": array(np.full((1, 4, 6), n, np.uint8))} for n in range(20)])
    assert Shards(root=str(tmp_path / "arrays"), size=6, channels=1, levels=256).prepare().spec.event_shape == (1, 4, 6)
    for root, options, said in ((folder, {"size": 8, "levels": 17}, "data.levels=17, but the items of .* have 256"),
                                (tmp_path / "arrays", {"size": 8}, "data.size=8, but .* have 6: leave it out"),
                                (tmp_path / "arrays", {"channels": 3}, "data.channels=3, but .* have 1: leave it out")):
        with pytest.raises(InputError, match=said):
            Shards(root=str(root), **options).prepare()


def test_a_record_of_somebody_else_is_no_record(folder):
    (folder / RECORD).write_text(json.dumps({"title": "pets"}))
    assert Shards(root=str(folder), size=8).prepare().spec.num_classes == 3


def test_initialisation_reads_a_bounded_part(tmp_path):
    write(tmp_path / "set", "0.tar", [{"npy": array(np.zeros((3, 400, 400), np.uint8))}] * 10)
    assert Shards(root=str(tmp_path / "set")).prepare().split("train").most_at_once == 2**26 // 480_000


@pytest.mark.parametrize("options", [{"size": 0}, {"levels": 1}, {"channels": 2}, {"layout": "h"}, {"val_fraction": 1}])
def test_settings_are_checked(options):
    with pytest.raises(InputError, match=f"data.{next(iter(options))}"):
        Shards(root="x", **options)


def test_shards_that_webdataset_wrote(tmp_path):
    wds = pytest.importorskip("webdataset", reason="webdataset is not installed")
    (tmp_path / "set").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 3), dtype=np.uint8)
    with wds.ShardWriter(str(tmp_path / "set" / "train-%06d.tar"), maxcount=8, verbose=False) as sink:
        for number, picture in enumerate(pixels):
            sink.write({"__key__": f"a/{number:04d}", "png": picture, "cls": number % 4, "json": {"n": number}})
    data = Shards(root=str(tmp_path / "set"), size=8).prepare()
    split = data.split("train")
    batch = split.__getitems__(range(len(split)))
    assert len(data.split("train").index.shards) == 4 and data.spec.num_classes == 4
    assert np.array_equal(batch.x.numpy(), pixels[split.rows.numpy()].transpose(0, 3, 1, 2))
    assert torch.equal(batch.cond, split.rows % 4)
