"""The stage of other data: which data set does a model find likelier than its own?"""

from __future__ import annotations

import torch

from genmodels.data.base import DataModule
from genmodels.data.spec import DataSpec
from genmodels.errors import InputError
from genmodels.evaluation import out_of_distribution
from genmodels.evaluation.frame import Frame, item_hash
from genmodels.evaluation.likelihood import Likelihood, packed, unpacked
from genmodels.evaluation.likelihood_stage import LikelihoodStage
from genmodels.evaluation.opened import fits


class OtherDataStage:
    """Other data sets under the first line of a model: histograms and the probability to tell an item of each apart."""

    def __init__(self, frame: Frame, likelihood: LikelihoodStage):
        self.frame, self.likelihood = frame, likelihood

    def run(self) -> None:
        """Judge each of them."""
        line, _ = self.likelihood.of_first_line()
        spec = self.frame.opened.spec
        for number, name in enumerate(self.frame.request.ood):
            other = self._other(name)
            count = min(self.frame.opened.items, len(other.split(self.frame.request.split)))
            digest = self._other_hash(name, other, count)

            def compute(other=other, name=name, count=count) -> dict:
                return packed(self.frame.opened.likelihood(line.method, line.options, name, other, count))

            found = unpacked(self.frame.once("ood", {"name": name, "items": digest, **line.options}, compute))
            self.frame.report["ood"].append(self._told_ood(name, number, found, count, spec))
            order = found.nats.argsort(descending=True)[:8]
            self.frame.arrays[f"ood_{number}_nats"] = found.nats
            self.frame.arrays[f"ood_{number}_x"] = next(iter(other.loader(self.frame.request.split, 8, order))).x

    def _other(self, name: str) -> DataModule:
        key = ("ood", name, id(self.frame.opened.datamodule))
        if key not in self.frame.shared:
            trust = list(self.frame.request.trust)
            self.frame.shared[key] = out_of_distribution.other_data(
                name, self.frame.request.ood_data, self.frame.opened.datamodule, trust)
        try:
            fits(self.frame.opened.model, self.frame.shared[key].spec)
        except InputError as error:
            raise InputError(f"ood={name}: {error}") from error
        return self.frame.shared[key]

    def _other_hash(self, name: str, other: DataModule, count: int) -> str:
        key = ("hash", id(other), count)
        if key not in self.frame.shared:
            self.frame.shared[key] = item_hash(other, self.frame.request.split, count)
        return self.frame.shared[key]

    def _told_ood(self, name: str, number: int, found: Likelihood, count: int, spec: DataSpec) -> dict:
        line, own = self.likelihood.of_first_line()
        inside, outside = own.nats, found.nats
        entry = {"name": name, "overrides": self.frame.request.ood_data, "n": count, "kind": found.kind,
                 "label": line.label, "values": f"ood_{number}_nats", "inside": "nats_0"}
        finite = bool(torch.isfinite(inside).all() and torch.isfinite(outside).all())
        unit = "unnormalised nats" if found.kind == "unnormalised" else "bits_per_dim" if spec.levels else "nats"
        if not finite:
            reason = found.made.get("reason", "values that are not finite")
            return {**entry, "value": unit, "auroc": None, "reason": reason, "said": f"{name}: {reason}"}
        area, error = out_of_distribution.auroc(inside, outside)
        means = {}
        for key, likelihood in (("mean_in", own), ("mean_out", found)):
            bits = unit == "bits_per_dim"
            means[key] = likelihood.mean_bits_per_dim() if bits else -likelihood.mean_nats()
        return {**entry, "value": unit, "auroc": area, "se": error, **means,
                "said": out_of_distribution.told(name, area, error, found.kind)}
