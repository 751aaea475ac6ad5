"""torchvision's data sets: splits, levels, and what is said when the files are missing."""

from __future__ import annotations

import pickle
import socket
import threading
import time

import numpy as np
import pytest
import torch
from torchvision import datasets

from genmodels.core.errors import InputError
from genmodels.data import vision
from genmodels.data.vision import CIFAR10, MNIST, FashionMNIST


def write_idx(folder, name: str, values: np.ndarray) -> None:
    """An IDX file: two zero bytes, type 8 (uint8), the number of axes, their lengths, the values."""
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes()
    (folder / name).write_bytes(header + values.astype(np.uint8).tobytes())


@pytest.fixture
def idx_root(tmp_path):
    """A small data set laid out as MNIST and as Fashion-MNIST."""
    rng = np.random.default_rng(0)
    for name in ("MNIST", "FashionMNIST"):
        raw = tmp_path / name / "raw"
        raw.mkdir(parents=True)
        for part, count in (("train", 600), ("t10k", 100)):
            write_idx(raw, f"{part}-images-idx3-ubyte", rng.integers(0, 256, (count, 28, 28)))
            write_idx(raw, f"{part}-labels-idx1-ubyte", np.arange(count) % 10)
    return tmp_path


@pytest.mark.parametrize("cls", [MNIST, FashionMNIST])
def test_idx_files(cls, idx_root, monkeypatch):
    monkeypatch.setattr(cls, "held_out", 100)
    module = cls(root=str(idx_root), download=False).prepare()
    assert module.problems() == [] and not module.flip
    assert (module.spec.event_shape, module.spec.levels, module.spec.num_classes) == ((1, 28, 28), 256, 10)
    assert [len(module.split(split)) for split in ("train", "val", "test")] == [500, 100, 100]
    truth = getattr(datasets, cls.torchvision_name)(str(idx_root), train=False)
    batch = next(iter(module.loader("test", 100)))
    assert torch.equal(batch.x[:, 0], truth.data) and torch.equal(batch.cond, truth.targets)
    held = torch.cat([batch.cond for batch in module.loader("val", 64)])
    assert held.bincount().tolist() == [10] * 10


def test_cifar_batches(tmp_path, monkeypatch):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]:
        entry = {"data": rng.integers(0, 256, (40, 3072), dtype=np.uint8), "labels": [k % 10 for k in range(40)]}
        (folder / name).write_bytes(pickle.dumps(entry))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    for part in ("train_list", "test_list"):
        monkeypatch.setattr(datasets.CIFAR10, part, [[name, None] for name, _ in getattr(datasets.CIFAR10, part)])
    monkeypatch.setitem(datasets.CIFAR10.meta, "md5", None)
    monkeypatch.setattr(CIFAR10, "held_out", 50)
    module = CIFAR10(root=str(tmp_path)).prepare()
    assert (module.spec.event_shape, len(module.split("train")), module.flip) == ((3, 32, 32), 150, True)
    first = pickle.loads((folder / "test_batch").read_bytes())["data"][0]
    batch = next(iter(module.loader("test", 4)))
    assert torch.equal(batch.x[0].flatten(), torch.from_numpy(first))  # planes of red, green, blue, row by row
    assert module.problems() == []


@pytest.fixture
def unreachable(monkeypatch):
    """No server answers, on any machine."""
    for cls in (datasets.MNIST, datasets.FashionMNIST):
        monkeypatch.setattr(cls, "mirrors", ["http://127.0.0.1:9/"])
    monkeypatch.setattr(datasets.CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")


def test_only_one_of_several_downloads_at_a_time(tmp_path):
    root, inside, most = tmp_path / "data", [], []

    def enter():
        for _ in range(20):
            with vision._one_at_a_time(root, set()):
                (root / "raw").mkdir()
                inside.append(root)
                most.append(len(inside))
                time.sleep(1e-3)
                inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 80 and not root.exists()


@pytest.mark.parametrize(
    ("cls", "files"),
    [(MNIST, "MNIST/raw/"), (FashionMNIST, "FashionMNIST/raw/"), (CIFAR10, "cifar-10-batches-py/")],
)
@pytest.mark.parametrize("download", [True, False])
def test_missing_files_give_one_line(cls, files, download, tmp_path, unreachable, capfd, refuses):
    root = tmp_path / "nowhere"
    message = refuses(InputError, None, cls(root=str(root), download=download).prepare)
    assert cls.name in message and files in message and f"data.root={root}" in message
    assert ("could not be downloaded" if download else "data.download=false") in message
    assert capfd.readouterr() == ("", "")
    assert not root.exists() and "is there" not in message
    place = root / files
    place.mkdir(parents=True)
    (place / "notes").touch()
    message = refuses(InputError, None, cls(root=str(root), download=download).prepare)
    assert message.endswith(f"{place} is there, with files missing or other than the published ones")
    assert [path.name for path in place.iterdir()] == ["notes"]


def test_a_server_that_never_answers_does_not_hang(tmp_path, monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(datasets.MNIST, "mirrors", [f"http://127.0.0.1:{silent.getsockname()[1]}/"])
        monkeypatch.setattr(vision, "_TIMEOUT", 0.3)
        with pytest.raises(InputError, match="mnist could not be downloaded .*timed out"):
            MNIST(root=str(tmp_path)).prepare()
    assert socket.getdefaulttimeout() is None


def test_a_file_that_was_cut_is_named_as_a_fault_of_the_data(idx_root, refuses):
    images = idx_root / "MNIST" / "raw" / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1000])
    assert "place MNIST/raw/" in refuses(InputError, "mnist", MNIST(root=str(idx_root), download=False).prepare)


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08\x00 compressed", b"\x00\x00\x08\x01"])
def test_a_file_of_something_else_is_named(content, idx_root, refuses):
    (idx_root / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").write_bytes(content)
    assert "place MNIST/raw/" in refuses(InputError, "mnist", MNIST(root=str(idx_root), download=False).prepare)


def test_the_real_mnist(shared_data):
    module = MNIST(root=str(shared_data), download=False).prepare()
    assert [len(module.split(split)) for split in ("train", "val", "test")] == [55000, 5000, 10000]
    assert module.problems() == []
    labels = torch.cat([batch.cond for batch in module.loader("test", 1000)])
    assert labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
