"""MNIST, Fashion-MNIST and CIFAR-10 through torchvision's own classes, held in memory as uint8."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
from pathlib import Path

import torch

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.core.files import open_lock
from genmodels.data.base import SPLITS, DataModule, data_root, split_rows
from genmodels.data.loading import TensorData

_TIMEOUT = 15.0  # seconds without an answer after which a server counts as unreachable


class _Vision(DataModule):
    """A torchvision data set: its standard test split, and `held_out` training items for validation.

    The validation items are drawn within each class by `seed`. A subclass names torchvision's class and the layout of
    its files below `root`.

    Arguments:
        root: folder of the files, in torchvision's layout.
        download: download missing files.
        batch_size, num_workers, seed: see `DataModule`.
    """

    torchvision_name: str
    layout: str
    class_names: tuple[str, ...] = ()
    held_out = 5000

    def __init__(
        self,
        *,
        root: str = "data",
        download: bool = True,
        batch_size: int = 128,
        **shared,
    ):
        super().__init__(batch_size=batch_size, **shared)
        self.root, self.download = data_root(root), download

    def _open(self, train: bool, download: bool = False):
        from torchvision import datasets

        return getattr(datasets, self.torchvision_name)(self.root, train=train, download=download)

    def _advice(self) -> str:
        return f"place {self.layout} below data.root={self.root} (or set data.root to its location)"

    def _found(self) -> str:
        folder = Path(self.root, *self.layout.split("/")[:-1])
        return f"; {folder} is there, with files missing or other than the published ones" if folder.is_dir() else ""

    def fetch(self) -> None:
        """Download missing files."""
        try:
            self._open(train=False)
            self._open(train=True)
        except Exception:  # torchvision's readers raise any of a damaged file
            if not self.download:
                raise InputError(f"{self.name} is missing and data.download=false: {self._advice()}{self._found()}"
                                 ) from None
            self._download()

    def _download(self) -> None:
        root = Path(self.root)
        before = {root, *root.parents, *root.rglob("*")} if root.exists() else set()
        timeout = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_TIMEOUT)
        try:
            with _one_at_a_time(root, before), _quiet():
                self._open(train=True, download=True)
        except Exception as error:
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            said = f"{self.name} could not be downloaded ({reason}): {self._advice()}{self._found()}"
            raise InputError(said) from None
        finally:
            socket.setdefaulttimeout(timeout)

    def load(self):
        """Both files in memory; validation is a stratified part of the training file."""
        try:
            parts = {train: self._open(train) for train in (True, False)}
        except Exception as error:
            raise InputError(f"{self.name} cannot be read ({error}): {self._advice()}") from None
        x, labels = {}, {}
        for train, part in parts.items():
            data = torch.as_tensor(part.data)
            x[train] = data[:, None] if data.dim() == 3 else data.permute(0, 3, 1, 2).contiguous()
            labels[train] = torch.as_tensor(part.targets, dtype=torch.int64)
        share = self.held_out / len(x[True])
        train, val, _ = split_rows(labels[True], len(x[True]), (1 - share, share, 0.0), self.seed)
        splits = {"train": TensorData(x[True], labels[True], train), "val": TensorData(x[True], labels[True], val),
                  "test": TensorData(x[False], labels[False])}
        return DataSpec(self.name, tuple(x[True].shape[1:]), 256, 10, self.class_names), splits


class MNIST(_Vision):
    """MNIST: 60,000 + 10,000 handwritten digits, (1, 28, 28), 256 levels, 10 classes (LeCun, Cortes, Burges).

    Arguments:
        root: folder that contains `MNIST/raw/`.
    """

    name = "mnist"
    torchvision_name = "MNIST"
    layout = "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte (four files, unpacked with gunzip)"


class FashionMNIST(_Vision):
    """Fashion-MNIST: 60,000 + 10,000 pictures of clothes, (1, 28, 28), 256 levels, 10 classes (Xiao et al., 2017).

    Arguments:
        root: folder that contains `FashionMNIST/raw/`.
    """

    name = "fashion_mnist"
    torchvision_name = "FashionMNIST"
    layout = (
        "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte (four files, unpacked with gunzip; "
        "Debian's package dataset-fashion-mnist has them)"
    )
    class_names = tuple("T-shirt trousers pullover dress coat sandal shirt sneaker bag boot".split())


class CIFAR10(_Vision):
    """CIFAR-10: 50,000 + 10,000 photographs, (3, 32, 32), 256 levels, 10 classes (Krizhevsky, 2009).

    Arguments:
        flip: mirror training items at random.
        **shared: what all of torchvision's data sets take; `root` contains `cifar-10-batches-py/`.
    """

    name = "cifar10"
    torchvision_name = "CIFAR10"
    layout = "cifar-10-batches-py/ (the unpacked cifar-10-python.tar.gz)"
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def __init__(self, *, flip: bool = True, **shared):
        super().__init__(**shared)
        self.flip = flip


@contextlib.contextmanager
def _one_at_a_time(root: Path, before: set[Path]):
    """Only one of several processes downloads: the others wait and then find the files.

    Folders that are empty afterwards are removed, but for those `before`.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        fcntl = None
    lock = root / ".download-lock"
    with contextlib.ExitStack() as held:
        while fcntl is not None:
            # Whoever had the lock may remove it at any moment, and the folder with it: then from the beginning.
            try:
                root.mkdir(parents=True, exist_ok=True)
            except FileExistsError:
                if os.path.lexists(root) and not root.is_dir():
                    raise
                continue
            with contextlib.suppress(FileNotFoundError):
                file = held.enter_context(open_lock(lock))
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                    break
        try:
            yield
        finally:  # while the lock is held, so that nothing is removed under a process that begins
            for folder in root.glob("*"):
                _remove_empty(folder, before)
            lock.unlink(missing_ok=True)
            if root not in before:
                with contextlib.suppress(OSError):  # it has files, or another process begins in it
                    root.rmdir()


@contextlib.contextmanager
def _quiet():
    """Suppress progress bars unless standard error is a terminal."""
    if sys.stderr.isatty():
        yield
    else:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield


def _remove_empty(root: Path, before: set[Path]) -> None:
    """Remove the empty folders of a failed download."""
    for folder in sorted([root, *root.rglob("*")], reverse=True):
        if folder not in before and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


class Digits(DataModule):
    """1,797 handwritten digits, (1, 8, 8), 17 grey levels, 10 classes; split 70/10/20 within each class.

    Source: E. Alpaydin, C. Kaynak, "Optical recognition of handwritten digits", UCI repository, 1998 (its test part,
    as in scikit-learn).

    Example:
        >>> data = Digits().prepare()
        >>> data.spec.event_shape, data.spec.levels, [len(data.split(s)) for s in ("train", "val", "test")]
        ((1, 8, 8), 17, [1258, 180, 359])
    """

    name = "digits"

    def load(self):
        """All in memory, as uint8."""
        from sklearn.datasets import load_digits

        table = load_digits()
        x = torch.from_numpy(table.images).to(torch.uint8)[:, None]
        labels = torch.from_numpy(table.target).to(torch.int64)
        rows = split_rows(labels, len(x), (0.7, 0.1, 0.2), self.seed)
        splits = {name: TensorData(x, labels, r) for name, r in zip(SPLITS, rows, strict=True)}
        return DataSpec("digits", (1, 8, 8), levels=17, num_classes=10), splits
