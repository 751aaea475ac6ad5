"""Shards are written whole, resumably, reproducibly, and hold what the data set holds."""

from __future__ import annotations

import io
import json
import multiprocessing
import tarfile
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, RunError
from genmodels.data import shard_writer
from genmodels.data.base import SPLITS, DataModule
from genmodels.data.image_folder import ImageFolder
from genmodels.data.loading import TensorData
from genmodels.data.shard_writer import encoded, write_shards
from genmodels.data.shards import RECORD, Shards
from genmodels.data.speech import Speech
from genmodels.data.toy import Toy
from genmodels.data.transport import Transport
from genmodels.data.utterances import BucketedBatchSampler
from genmodels.data.vision import Digits
from genmodels.speech.audio import write_wav
from tests.data.test_base import Broken


class Sounds(DataModule):
    """Log-mels of different lengths with classes."""

    def load(self):
        """Bands (3) and up to 8 frames, padded with silence."""
        from genmodels.data.utterances import FLOOR

        x = torch.randn(20, 3, 8)
        mask = (torch.arange(8) < torch.arange(20)[:, None] % 4 * 2 + 2)[:, None]
        x = x.where(mask, FLOOR)

        class Padded(TensorData):
            def __getitems__(self, positions):
                batch = super().__getitems__(positions)
                return Batch(batch.x, batch.cond, mask.index_select(0, self.rows[batch.index]), batch.index)

        rows = torch.arange(20).split([12, 4, 4])
        spec = DataSpec("sounds", (3, 8), None, 2, ("a", "b"), mel={"n_mels": 3}, statistics={"mean": 0.0, "std": 1.0})
        return spec, {s: Padded(x, torch.arange(20) % 2, r) for s, r in zip(SPLITS, rows, strict=True)}

    def training_batches(self, data):
        """As those of `Speech`."""
        return BucketedBatchSampler(torch.full((len(data),), 8), self.batch_size, None, self.order_seed, width=8)


class Wide(DataModule):
    """Images that are no PNG: more than 256 levels, four channels, not square."""

    def load(self):
        """int32 levels."""
        x = torch.randint(0, 1000, (12, 4, 2, 3), dtype=torch.int32)
        rows = torch.arange(12).split([8, 2, 2])
        return DataSpec("wide", (4, 2, 3), 1000), {s: TensorData(x, None, r) for s, r in zip(SPLITS, rows, strict=True)}


class Speakers(Speech):
    """The clips inside the package, as if two people had read them."""

    def load(self):
        """Speakers in turn."""
        spec, splits = super().load()
        for data in splits.values():
            data.items = [replace(item, speaker=number % 2) for number, item in enumerate(data.items)]
        return replace(spec, speakers=("he", "she")), splits


OPTIONS = {"batch_size": 4, "num_workers": 0, "seed": 0}
SETS = {
    "images": lambda: Digits(batch_size=4),
    "vectors": lambda: Toy(n_train=50, n_val=7, n_test=7, batch_size=4),
    "mels": lambda: Sounds(**OPTIONS),
    "wide": lambda: Wide(**OPTIONS),
    "texts": lambda: Speech(batch_size=4),
    "texts of speakers": lambda: Speakers(batch_size=4),
}


def same(ours, theirs) -> bool:
    """Whether all tensors of two batches, or of two conditions, are equal."""
    if ours is None or isinstance(ours, torch.Tensor):
        return ours is theirs or torch.equal(ours, theirs)
    return all(same(getattr(ours, field.name), getattr(theirs, field.name)) for field in fields(ours))


@pytest.mark.parametrize("name", SETS)
def test_shards_give_what_the_data_set_gives(name, tmp_path):
    """Batches of every split, classes and the description are equal, and so is the order of training."""
    module = SETS[name]().prepare()
    record = write_shards(module, tmp_path / "out", 7, {"name": name})
    shards = Shards(root=str(tmp_path / "out"), batch_size=4).prepare()
    assert shards.spec == module.spec and record["items"] == {s: len(module.split(s)) for s in SPLITS}
    for split in SPLITS:
        rows = range(min(40, len(module.split(split))))
        for ours, theirs in zip(shards.loader(split, 16, rows), module.loader(split, 16, rows), strict=True):
            assert ours.x.dtype == theirs.x.dtype and torch.equal(ours.x, theirs.x)
            assert same(ours, theirs)
    assert same(*(next(iter(one.train_dataloader())) for one in (shards, module)))
    assert shards.problems() == []


def small(seed: int = 0) -> Toy:
    return Toy(n_train=50, n_val=7, n_test=7, batch_size=4, seed=seed).prepare()


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {place.name: place.read_bytes() for place in folder.iterdir() if not place.name.startswith(".")}


def _write_slowly(out: str, reached) -> None:
    real = shard_writer.encoded

    def slowly(batch, spec):
        if int(batch.index[0]) == 25:
            reached.set()
            import time

            time.sleep(60)
        return real(batch, spec)

    shard_writer.encoded = slowly
    write_shards(small(), Path(out), 10, {})


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
def test_a_killed_writer_is_continued(tmp_path, monkeypatch):
    """Killed within the third shard: two are whole, the next call writes only the others, byte for byte the same."""
    write_shards(small(), tmp_path / "whole", 10, {})
    context = multiprocessing.get_context("fork")
    reached = context.Event()
    process = context.Process(target=_write_slowly, args=(str(tmp_path / "out"), reached))
    process.start()
    assert reached.wait(60)
    process.kill()
    process.join()
    names = sorted(place.name for place in (tmp_path / "out").glob("*.tar"))
    assert names == ["train-000000.tar", "train-000001.tar"]
    assert len(list((tmp_path / "out").glob(".*.tmp"))) == 1
    with pytest.raises(InputError, match="are not complete: repeat the command genmodels shards"):
        Shards(root=str(tmp_path / "out")).prepare()
    written, real = [], shard_writer.encoded
    monkeypatch.setattr(shard_writer, "encoded", lambda *args: written.append(1) or real(*args))
    write_shards(small(), tmp_path / "out", 10, {})
    assert len(written) == 30 + 7 + 7 and bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
    assert not list((tmp_path / "out").glob(".*.tmp")) and not (tmp_path / "out" / ".lock").exists()


def test_a_part_written_in_another_order_is_not_continued(tmp_path):
    """Held-out items would be there twice and others not at all; all shards of an earlier version stay as they are."""
    write_shards(small(), tmp_path, 10, {})
    record = json.loads((tmp_path / RECORD).read_text())
    (tmp_path / RECORD).write_text(json.dumps({key: value for key, value in record.items() if key != "order"}))
    before = bytes_of(tmp_path)
    write_shards(small(), tmp_path, 10, {})
    assert {name: held for name, held in bytes_of(tmp_path).items() if name != RECORD} == {
        name: held for name, held in before.items() if name != RECORD}
    (tmp_path / "val-000000.tar").unlink()
    with pytest.raises(InputError, match="an earlier version, in another order"):
        write_shards(small(), tmp_path, 10, {})


def test_other_data_in_the_same_folder_are_refused(tmp_path):
    out = tmp_path / "out"
    write_shards(small(), out, 10, {"seed": 0})
    before = bytes_of(out)
    write_shards(small(), out, 10, {"seed": 0})
    for module, items, source, said in ((small(1), 10, {"seed": 1}, "source"), (small(), 9, {"seed": 0}, "per_shard"),
                                        (Digits().prepare(), 10, {"seed": 0}, "spec, items")):
        with pytest.raises(InputError, match=f"holds shards of other data .{said}"):
            write_shards(module, out, items, source)
    assert bytes_of(out) == before


def folder_of_pictures(root: Path, first: int) -> ImageFolder:
    """Ten uncompressed pictures that differ for every number; all files have one size."""
    root.mkdir(exist_ok=True)
    for number in range(10):
        Image.fromarray(np.full((8, 8, 3), first + number, np.uint8)).save(root / f"{number}.bmp")
    return ImageFolder(root=str(root), size=8).prepare()


def test_pictures_replaced_under_the_same_names_are_other_data(tmp_path):
    out = tmp_path / "out"
    write_shards(folder_of_pictures(tmp_path / "pictures", 0), out, 4, {})
    before = bytes_of(out)
    write_shards(folder_of_pictures(tmp_path / "pictures", 0), out, 4, {})
    with pytest.raises(InputError, match="pictures has changed since the shards in out=.* were written .10 pictures, "):
        write_shards(folder_of_pictures(tmp_path / "pictures", 50), out, 4, {})
    assert bytes_of(out) == before
    # A record of an earlier version has a fingerprint of names alone: its shards are read and kept.
    record = json.loads(before[RECORD])
    record["spec"]["fingerprint"] = record["spec"]["fingerprint"].partition(", contents")[0]
    (out / RECORD).write_text(json.dumps(record))
    written = write_shards(folder_of_pictures(tmp_path / "pictures", 50), out, 4, {})
    assert written["spec"] == record["spec"] and written["shards"] == record["shards"]
    assert int(Shards(root=str(out)).prepare().items("train").x.max()) < 10


def test_shards_state_the_multiple_of_the_lengths_of_their_utterances(tmp_path):
    """Those of earlier versions do in the configuration that they came from."""
    module, source = Speech(multiple=3, batch_size=4).prepare(), {"_target_": "genmodels.data.speech.Speech"}
    record = write_shards(module, tmp_path / "out", 20, source | {"multiple": 3})
    assert record["spec"]["statistics"].pop("multiple") == 3
    (tmp_path / "out" / RECORD).write_text(json.dumps(record))
    shards = Shards(root=str(tmp_path / "out"), batch_size=4).prepare()
    assert shards.spec == module.spec and shards.spec.statistics["multiple"] == 3
    assert write_shards(module, tmp_path / "out", 20, source | {"multiple": 3})["shards"] == record["shards"]


@pytest.mark.parametrize("max_frames", [None, 100])
def test_mels_with_classes_are_trained_on_in_the_same_batches(max_frames, tmp_path):
    for number in range(17):
        place = tmp_path / "sounds" / "ab"[number % 2] / f"{number}.wav"
        place.parent.mkdir(parents=True, exist_ok=True)
        write_wav(place, torch.randn(3000 + 500 * number) / 9, 22050)
    options = {"batch_size": 4, "max_frames": max_frames}
    module = Speech(root=str(tmp_path / "sounds"), layout="folder", val_fraction=0.1, test_fraction=0.1, **options)
    write_shards(module.prepare(), tmp_path / "out", 7, {})
    shards = Shards(root=str(tmp_path / "out"), **options).prepare()
    batches = [list(one.train_dataloader()) for one in (shards, module)]
    assert len(batches[0]) == (4 if max_frames is None else 7)
    assert all(same(ours, theirs) for ours, theirs in zip(*batches, strict=True))


def test_where_nothing_was_written_other_data_are_welcome(tmp_path):
    """A first command that was stopped before its first shard leaves a record without shards."""
    with pytest.raises(InputError, match="item 3 of broken"):
        write_shards(Broken(**OPTIONS).prepare(), tmp_path / "out", 10, {"seed": 1})
    assert json.loads((tmp_path / "out" / RECORD).read_text())["shards"] is None
    assert write_shards(small(), tmp_path / "out", 10, {})["source"] == {}


def test_items_that_come_with_others_are_refused(tmp_path):
    """Shards of data=transport would be without the source, and no model could be trained on them."""
    with pytest.raises(InputError, match="pairs its items anew with those of toy_moons in every epoch"):
        write_shards(Transport(source="moons", target="banana").prepare(), tmp_path / "out", 100, {})
    assert not (tmp_path / "out").exists()


def test_a_damaged_shard_is_not_recorded_as_whole(tmp_path):
    out = tmp_path / "out"
    write_shards(small(), out, 10, {})
    record = json.loads((out / RECORD).read_text())
    (out / RECORD).write_text(json.dumps(record | {"shards": None}))
    (out / "train-000001.tar").write_bytes(b"")
    with pytest.raises(RunError, match="1 shards in .* are damaged: 'train-000001.tar'"):
        write_shards(small(), out, 10, {})


def test_a_shard_that_was_altered_is_not_recorded_anew(tmp_path):
    """The record still tells what was written; without the shard it is written again."""
    out = tmp_path / "out"
    write_shards(small(), out, 10, {})
    before, altered = bytes_of(out), bytearray((out / "train-000001.tar").read_bytes())
    altered[700] ^= 1
    (out / "train-000001.tar").write_bytes(altered)
    with pytest.raises(RunError, match="train-000001.tar in .* differ from what was written: remove these files"):
        write_shards(small(), out, 10, {})
    assert (out / RECORD).read_bytes() == before[RECORD]
    (out / "train-000001.tar").unlink()
    write_shards(small(), out, 10, {})
    assert bytes_of(out) == before


def test_folders_of_others_and_damaged_records_are_refused(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "train-000000.tar").write_bytes(b"mine")
    with pytest.raises(InputError, match="holds shards without a record of genmodels: choose another folder"):
        write_shards(small(), out, 10, {})
    assert bytes_of(out) == {"train-000000.tar": b"mine"}
    for content, said in (('{"genmodels":1', "dataset.json is damaged"), ("[]", "without a record of genmodels"),
                          ('{"name": "mine"}', "without a record of genmodels")):
        (out / RECORD).write_text(content)
        with pytest.raises(InputError, match=said):
            write_shards(small(), out, 10, {})
        assert (out / RECORD).read_text() == content


def test_two_writers_do_not_share_a_folder(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    out = tmp_path / "out"
    out.mkdir()
    context = multiprocessing.get_context("fork")
    held, done = context.Event(), context.Event()

    def hold():
        with open(out / ".lock", "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            held.set()
            done.wait(60)

    process = context.Process(target=hold)
    process.start()
    assert held.wait(60)
    with pytest.raises(InputError, match="another process is writing shards"):
        write_shards(small(), out, 10, {})
    done.set()
    process.join()


def test_bad_values_are_not_written(tmp_path):
    with pytest.raises(InputError, match="item 3 of broken holds a value that is not finite"):
        write_shards(Broken(**OPTIONS).prepare(), tmp_path / "out", 10, {})


def test_files_of_an_item():
    grey, colour = torch.randint(0, 256, (1, 1, 3, 5), dtype=torch.uint8), torch.randint(0, 256, (1, 3, 4, 4))
    for x in (grey, colour.to(torch.uint8)):
        files = encoded(Batch(x), DataSpec("images", tuple(x.shape[1:]), 256))
        array = np.atleast_3d(np.array(Image.open(io.BytesIO(files["png"]))))
        assert list(files) == ["png"] and np.array_equal(array.transpose(2, 0, 1), x[0].numpy())
    vector = encoded(Batch(torch.tensor([[1.5, 2.0]]), torch.tensor([4])), DataSpec("rows", (2,), None, 5))
    assert np.load(io.BytesIO(vector["npy"])).tolist() == [1.5, 2.0] and vector["cls"] == b"4"


def test_webdataset_reads_our_shards(tmp_path):
    wds = pytest.importorskip("webdataset", reason="webdataset is not installed")
    module = SETS["images"]().prepare()
    write_shards(module, tmp_path / "out", 200, {})
    url = str(tmp_path / "out" / "test-000000.tar")
    found = list(wds.WebDataset(url, shardshuffle=False).decode("pil").to_tuple("__key__", "png", "cls"))
    want = next(iter(module.loader("test", 200)))
    assert [key for key, _, _ in found] == [f"{n:09d}" for n in range(200)]
    for (_, image, label), x, number in zip(found, want.x, want.cond, strict=True):
        assert np.array_equal(np.array(image.convert("L")), x[0].numpy()) and label == int(number)


def test_tars_are_plain(tmp_path):
    """No owner and no time in them, so that the same data give the same bytes."""
    write_shards(small(), tmp_path / "out", 10, {})
    with tarfile.open(tmp_path / "out" / "val-000000.tar") as tar:
        assert {(m.mtime, m.uid, m.uname) for m in tar.getmembers()} == {(0, 0, "")}


def test_a_lost_shard_moves_no_item_to_another_split(tmp_path, refuses):
    whole = Toy(n_train=50, n_val=17, n_test=7, batch_size=4).prepare()
    write_shards(whole, tmp_path / "a", 10, {})
    (tmp_path / "a/val-000001.tar").rename(tmp_path / "lost.tar")
    with pytest.warns(UserWarning, match="left out 1 shards"):
        data = Shards(root=str(tmp_path / "a"), skip_bad=True).prepare()
    assert [len(data.split(split)) for split in ("train", "val", "test")] == [50, 10, 7]
    assert data.spec.fingerprint.startswith("without 1 shard ")  # by which resume and evaluation notice it
    assert not data.spec.fingerprint.startswith(whole.spec.fingerprint)
    (tmp_path / "a/test-000000.tar").unlink()
    with pytest.warns(UserWarning, match="left out 2 shards"):
        refuses(InputError, "all shards of test in", Shards(root=str(tmp_path / "a"), skip_bad=True).prepare)
