"""What all stages of one checkpoint's evaluation share: the model, the cache, the report as it grows."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from datetime import datetime, timezone

import torch
from torch import Tensor

from genmodels import __version__
from genmodels.data.base import DataModule
from genmodels.data.spec import TextCondition
from genmodels.evaluation.cache import Cache, code_hash, key_of
from genmodels.evaluation.opened import Opened
from genmodels.evaluation.request import Request
from genmodels.models.load import weights_of
from genmodels.training.archive import checkpoint_hash
from genmodels.training.run import training_time


class Frame:
    """A checkpoint under evaluation, and what has been found of it so far.

    Arguments:
        opened: the model and its data.
        cache: where results are kept.
        shared: what the models of a table have in common (item hashes, the feature network); filled here.

    Attributes:
        report: plain types, as it stands after the stages done so far.
        arrays: numbers for pictures by name.
    """

    def __init__(self, opened: Opened, cache: Cache, shared: dict):
        self.opened, self.cache, self.shared = opened, cache, shared
        self.sha256 = checkpoint_hash(opened.path)
        self.arrays: dict[str, Tensor] = {}
        self.report = self._head()

    @property
    def request(self) -> Request:
        """What was asked."""
        return self.opened.request

    def _head(self) -> dict:
        opened, header, request = self.opened, self.opened.header, self.opened.request
        spec = opened.spec
        return {
            "format": 1,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "genmodels": {
                "version": __version__, "torch": torch.__version__, "python": platform.python_version(),
                "device": str(opened.model.device), "threads": torch.get_num_threads(),
            },
            "name": header["family"],
            "checkpoint": {
                "path": str(opened.path), "sha256": self.sha256, "step": header["step"], "epoch": header.get("epoch"),
                "family": header["family"], "parameters": header["parameters"],
                "weights": str(weights_of(request.ema)), "training_seconds": training_time(opened.path.parent) or None,
            },
            "config": header["config"],
            "data": {
                "name": spec.name, "split": request.split, "items": opened.items, "limited": opened.limited,
                "item_hash": self.hash_of(request.split, opened.items), "event_shape": list(spec.event_shape),
                "levels": spec.levels, "units": "levels" if spec.levels else "the data's own",
                "mel": spec.mel, "num_classes": spec.num_classes, "class_names": list(spec.class_names),
            },
            "likelihood": [], "references": [], "items": {}, "profile": {}, "drift": {}, "proofs": [], "fidelity": {},
            "sampling": {}, "sweeps": [], "samples": {}, "neighbours": {}, "density": {}, "ood": [],
            "warnings": [], "failed": [], "seconds": {},
        }

    def hash_of(self, split: str, count: int | None = None) -> str:
        """The hash of the first `count` items of a split, all of them by default."""
        key = ("hash", id(self.opened.datamodule), split, count)
        if key not in self.shared:
            self.shared[key] = item_hash(self.opened.datamodule, split, count)
        return self.shared[key]

    def once(self, stage: str, settings: dict, compute: Callable[[], dict]) -> dict:
        """The result of a stage from the cache, or computed and kept."""
        model = self.opened.model
        key = key_of(
            stage=stage, checkpoint=self.sha256, settings=settings, data=self.report["data"]["item_hash"],
            items=self.opened.items, split=self.request.split, weights=str(weights_of(self.request.ema)),
            seed=self.request.seed, batch_size=self.request.batch_size, processes=self.request.processes,
            device=str(model.device), threads=torch.get_num_threads(), torch=torch.__version__, code=code_hash(),
            data_options=self.request.data,
        )
        found = self.cache.get(key)
        return self.cache.put(key, compute()) if found is None else found

    def sampling_settings(self) -> dict:
        """How samples are drawn, for the keys of the cache."""
        request = self.request
        return {"sampler": request.sampler, "steps": request.steps, "temperature": request.temperature}


def item_hash(datamodule: DataModule, split: str, limit: int | None = None) -> str:
    """A hash of the items judged: their indices, values and labels."""
    indices = None if limit is None else torch.arange(min(limit, len(datamodule.split(split))))
    digest = hashlib.sha256()
    for batch in datamodule.loader(split, 1024, indices):
        said = batch.cond
        parts = (said.tokens, said.speaker) if isinstance(said, TextCondition) else (said,)
        for tensor in (batch.index, batch.x, *parts):
            if tensor is not None:
                digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
