"""Tar files in WebDataset's format: keys, offsets, the index, and what is said about broken ones."""

from __future__ import annotations

import http.server
import io
import os
import pickle
import tarfile
import threading

import numpy as np
import pytest

from genmodels.core.errors import InputError, RunError
from genmodels.data import tars
from genmodels.data.tars import INDEX_NAME, Storage, grouped, index_of, members, missing_numbers, scan, write_tar


def items(count: int, first: int = 0) -> list[tuple[str, dict[str, bytes]]]:
    """Items of different lengths."""
    return [(f"{n:06d}", {"npy": bytes([n % 256]) * (600 + n), "cls": str(n % 7).encode()})
            for n in range(first, first + count)]


def shard(place, *args) -> bytes:
    """A shard on disk; its bytes."""
    file = io.BytesIO()
    write_tar(file, items(*args))
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(file.getvalue())
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Three shards of 5 items."""
    for number in range(3):
        shard(tmp_path / "set" / f"train-{number:03d}.tar", 5, 5 * number)
    return tmp_path / "set"


def contents(storage: Storage, index) -> list[bytes]:
    return storage.ranges([(index.shards[one["shard"]], int(one["start"]), int(one["size"])) for one in index.items])


def expected() -> list[bytes]:
    return [files["npy"] for _, files in items(15)]


def test_every_item_is_found_where_it_is(folder):
    storage = Storage(str(folder))
    index = index_of(storage)
    assert index.shards == ("train-000.tar", "train-001.tar", "train-002.tar") and index.kinds == ("npy",)
    assert contents(storage, index) == expected()
    assert index.items["label"].tolist() == [n % 7 for n in range(15)] and index.bad == {}
    assert contents(pickle.loads(pickle.dumps(storage)), index) == expected()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_kind_of_tar_with_long_names(form):
    file, long = io.BytesIO(), "folder/" * 20 + "ä" * 10
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for extension, content in (("npy", b"x" * 700), ("CLS", b" 12\n"), ("txt", b"a cat")):
            name = f"{'short' if form == tarfile.USTAR_FORMAT else long}.{extension}"
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        tar.addfile(tarfile.TarInfo("without-extension"))
    file.seek(0)
    ((kind, start, size, label),) = scan(file)
    assert (kind, label) == ("npy", 12) and file.getvalue()[start : start + size] == b"x" * 700


def test_members_are_those_of_tarfile(folder):
    """Ground truth: the standard library's own listing."""
    place = folder / "train-001.tar"
    with open(place, "rb") as file, tarfile.open(place) as tar:
        assert list(members(file)) == [(m.name, m.offset_data, m.size) for m in tar.getmembers()]


def test_a_shard_cut_off_anywhere_is_truncated(folder):
    """Also where a header or the padding of an item ends: only whole archives have the mark of their end."""
    whole = (folder / "train-000.tar").read_bytes()
    last = list(members(io.BytesIO(whole)))[-1]
    end = last[1] + -(-last[2] // 512) * 512
    for cut in (*range(0, end, 256), end, end + 100):
        with pytest.raises(ValueError, match="truncated"):
            scan(io.BytesIO(whole[:cut]))
    assert len(scan(io.BytesIO(whole[: end + 512]))) == 5


def test_a_damaged_header_is_found(folder):
    """tarfile itself ends at one without a word."""
    whole = bytearray((folder / "train-000.tar").read_bytes())
    start = list(members(io.BytesIO(whole)))[4][1] - 512
    whole[start + 150] ^= 1  # its checksum
    with pytest.raises(ValueError, match=f"damaged at byte {start}"):
        scan(io.BytesIO(whole))


@pytest.mark.parametrize(("files", "options", "said"), [
    ({"jpg": b"", "png": b""}, {}, "several candidates .jpg, png.: choose one by data.field=jpg"),
    ({"txt": b"", "json": b""}, {}, "has no image or array .npy., only txt, json"),
    ({"png": b""}, {"field": "jpg"}, "has no jpg, only png"),
    ({"png": b"", "cls": b"cat"}, {}, "the class of item 7 is 'cat', not a number"),
    ({"png": b"", "cls": b"-1"}, {}, "the class of item 7 is '-1'"),
    ({"png": b"", "cls": b"9" * 40}, {}, "the class of item 7 is '9"),
])  # fmt: skip
def test_items_that_cannot_be_understood(files, options, said):
    file = io.BytesIO()
    write_tar(file, [("7", files)])
    file.seek(0)
    with pytest.raises(ValueError, match=said):
        scan(file, **options)


def test_an_item_with_the_same_file_twice_and_an_empty_shard():
    with pytest.raises(ValueError, match="item a has two files .png"):
        list(grouped([("a.png", 0, 1), ("a.PNG", 1, 1)]))
    file = io.BytesIO()
    write_tar(file, [])
    file.seek(0)
    with pytest.raises(ValueError, match="no items"):
        scan(file)


def test_the_item_is_the_image_or_the_chosen_file():
    file = io.BytesIO()
    write_tar(file, [("7", {"json": b"{}", "png": b"12", "npy": b"345", "seg.png": b"6789", "id": b"3"})])
    for options, found in (({}, ("png", 2, -1)), ({"field": "npy", "label": "id"}, ("npy", 3, 3)),
                           ({"field": "seg.png"}, ("seg.png", 4, -1))):
        file.seek(0)
        ((kind, _, size, label),) = scan(file, **options)
        assert (kind, size, label) == found


def test_the_index_is_kept_until_a_shard_changes(folder, monkeypatch):
    real, scanned = tars.scan, []
    monkeypatch.setattr(tars, "scan", lambda *args: scanned.append(1) or real(*args))
    first = index_of(Storage(str(folder)))
    again = index_of(Storage(str(folder)))
    assert len(scanned) == 3 and (folder / INDEX_NAME).is_file()
    assert np.array_equal(first.items, again.items) and (first.shards, first.kinds) == (again.shards, again.kinds)
    shard(folder / "train-001.tar", 7)
    assert len(index_of(Storage(str(folder))).items) == 17 and len(scanned) == 6
    (folder / INDEX_NAME).write_bytes((folder / INDEX_NAME).read_bytes()[:-30])
    assert len(index_of(Storage(str(folder))).items) == 17
    assert index_of(Storage(str(folder)), label="no").items["label"].tolist() == [-1] * 17


def test_a_missing_number_and_a_truncated_shard_are_named(folder):
    whole = (folder / "train-002.tar").read_bytes()
    (folder / "train-002.tar").write_bytes(whole[:3000])
    (folder / "train-001.tar").unlink()
    bad = index_of(Storage(str(folder))).bad
    assert set(bad) == {"train-001.tar", "train-002.tar"}
    assert bad["train-001.tar"] == "it is missing" and "truncated" in bad["train-002.tar"]
    assert len(index_of(Storage(str(folder))).items) == 5
    assert missing_numbers(["scan-20230101.tar", "scan-20240101.tar"]) == []


def test_recorded_shards_are_compared_with_the_record(folder):
    sizes = {place.name: {"bytes": place.stat().st_size, "sha256": "0"} for place in folder.glob("*.tar")}
    assert index_of(Storage(str(folder)), sizes).bad == {}
    (folder / "train-000.tar").write_bytes((folder / "train-000.tar").read_bytes()[:512])
    (folder / "train-001.tar").unlink()
    (folder / "further.tar").write_bytes(b"")
    assert index_of(Storage(str(folder)), sizes).bad == {
        "train-001.tar": "it is missing", "train-000.tar": f"it has 512 of {sizes['train-000.tar']['bytes']:,} bytes"}


def test_what_is_no_folder_of_shards_is_one_line(tmp_path):
    for address, said in ((tmp_path / "nowhere", "there are no shards"), ("s4://bucket/x", "s4"),
                          (tmp_path, "no shards .*a-0.tar.gz is compressed")):
        (tmp_path / "a-0.tar.gz").touch()
        with pytest.raises(InputError, match=said) as caught:
            Storage(str(address)).shards()
        assert "\n" not in str(caught.value) and "data.root=" in str(caught.value)


def test_one_file_and_a_pattern(folder):
    assert list(Storage(str(folder / "train-001.tar")).shards()) == ["train-001.tar"]
    shard(folder / "val-000.tar", 2)
    assert len(Storage(str(folder / "train-*.tar")).shards()) == 3
    with_brackets = folder.rename(folder.parent / "set[1]")  # no characters of the pattern
    assert len(Storage(str(with_brackets / "train-*.tar")).shards()) == 3
    assert list(Storage(str(with_brackets / "train-001.tar")).shards()) == ["train-001.tar"]
    with_brackets.rename(folder)
    shard(folder / ".trash" / "train-009.tar", 2)
    shard(folder / "more" / "train-009.tar", 2)
    assert list(Storage(str(folder)).shards())[0] == "more/train-009.tar" and len(Storage(str(folder)).shards()) == 5


def test_a_shard_that_is_gone_or_shorter_while_training(folder):
    storage = Storage(str(folder))
    with pytest.raises(RunError, match="train-000.tar can no longer be read: it is shorter"):
        storage.ranges([("train-000.tar", 10, 10**6)])
    (folder / "train-000.tar").unlink()
    with pytest.raises(RunError, match="train-000.tar can no longer be read"):
        Storage(str(folder)).ranges([("train-000.tar", 0, 10)])


def test_few_files_are_open_at_once(folder, monkeypatch):
    monkeypatch.setattr(tars, "_OPEN_FILES", 2)
    storage = Storage(str(folder))
    index = index_of(storage)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert contents(storage, index) == contents(storage, index) == expected()
    assert len(storage._files) == 2
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.fixture
def addresses(folder):
    """The same shards in memory, and behind a server of this machine that answers ranges."""
    import fsspec

    memory = fsspec.filesystem("memory")
    for place in folder.glob("*.tar"):
        memory.pipe(f"/tars/{place.name}", place.read_bytes())

    class Ranges(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, directory=str(folder), **kwargs)

        def log_message(self, *args):
            pass

        def do_GET(self):
            wanted = self.headers.get("Range", "").removeprefix("bytes=")
            if not wanted:
                return super().do_GET()
            content = (folder / self.path.lstrip("/")).read_bytes()
            first, last = wanted.split("-")
            part = content[int(first) : int(last) + 1]
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
            self.end_headers()
            self.wfile.write(part)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ranges)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"memory": "memory://tars", "simplecache": "simplecache::memory://tars",
           "http": f"http://127.0.0.1:{server.server_address[1]}/"}
    server.shutdown()
    server.server_close()
    memory.rm("/tars", recursive=True)


@pytest.mark.parametrize("protocol", ["memory", "http", "simplecache"])
def test_addresses_of_fsspec_give_the_same_items(protocol, addresses, folder):
    storage = Storage(addresses[protocol])
    index = index_of(storage)
    assert not storage.is_local and contents(storage, index) == expected()
    assert np.array_equal(index.items, index_of(Storage(str(folder))).items)
    with pytest.raises(RunError, match="can no longer be read"):
        storage.ranges([("train-000.tar", 0, 10), ("train-009.tar", 0, 10)])


def test_a_server_may_hold_the_index(addresses, folder, monkeypatch, tmp_path):
    """The index beside the shards is copied with them: their headers are not read again."""
    sizes = {place.name: {"bytes": place.stat().st_size, "sha256": "0"} for place in folder.glob("*.tar")}
    monkeypatch.setenv("GENMODELS_CACHE", str(tmp_path / "empty"))
    index = index_of(Storage(str(folder)), sizes)
    import fsspec

    fsspec.filesystem("memory").pipe(f"/tars/{INDEX_NAME}", (folder / INDEX_NAME).read_bytes())
    monkeypatch.setattr(tars, "scan", None)
    assert np.array_equal(index_of(Storage(addresses["memory"]), sizes).items, index.items)
