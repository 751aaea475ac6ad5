"""Evaluation of a checkpoint: likelihood, sample quality, cost and checks, the same for every family."""

from __future__ import annotations

import time
from contextlib import contextmanager

from PIL import Image
from torch import Tensor
from tqdm import tqdm

from genmodels.core.errors import Interrupted
from genmodels.core.processes import Ranks
from genmodels.evaluation import cost
from genmodels.evaluation.cache import Cache
from genmodels.evaluation.checkpoint import Frame, Opened
from genmodels.evaluation.likelihood import LikelihoodStage
from genmodels.evaluation.out_of_distribution import OtherDataStage
from genmodels.evaluation.references import references
from genmodels.evaluation.report import Drift, Layer, Reference, Report, SamplingCost
from genmodels.evaluation.sample_quality import FidelityStage
from genmodels.evaluation.samples import draw
from genmodels.evaluation.speech import audit, picture_of_audit, require_texts
from genmodels.models.checkpoint import weights_of
from genmodels.models.density import is_flow
from genmodels.verification.check import Check
from genmodels.verification.checkpoints import ModelSubject, verify_checkpoint

_CHECKS = 60.0  # seconds that the checks may take unless checks=full


class Evaluation:
    """The stages of one checkpoint's evaluation, each of them computed once for the same checkpoint and settings.

    Arguments:
        opened: the model and its data.
        cache: where results are kept.
        shared: what the models of a table have in common (item hashes, the feature network); filled here.
        ranks: the processes of this command.

    Attributes:
        pictures: pictures in files of their own next to the report, by name.
    """

    def __init__(self, opened: Opened, cache: Cache, shared: dict | None = None, ranks: Ranks | None = None):
        self.frame = Frame(opened, cache, {} if shared is None else shared, ranks or Ranks())
        self.pictures: dict[str, Image.Image] = {}
        self.likelihood = LikelihoodStage(self.frame)
        self.fidelity = FidelityStage(self.frame)
        self.other_data = OtherDataStage(self.frame, self.likelihood)

    @property
    def opened(self) -> Opened:
        """The model and its data."""
        return self.frame.opened

    @property
    def report(self) -> Report:
        """As it stands after the stages done so far."""
        return self.frame.report

    @property
    def arrays(self) -> dict[str, Tensor]:
        """Numbers for pictures by name."""
        return self.frame.arrays

    @contextmanager
    def _timed(self, stage: str):
        start = time.monotonic()
        yield
        self.report.seconds[stage] = round(self.report.seconds.get(stage, 0.0) + time.monotonic() - start, 3)

    def run(self) -> Report:
        """Every stage that is wanted, in order; the report.

        Raises:
            Interrupted: with what is finished in `report`, which says `partial`.
        """
        stages = {"likelihood": self.likelihood.run, "audit": self.audit, "ood": self.other_data.run,
                  "fidelity": self.fidelity.run, "cost": self.cost, "checks": self.checks,
                  "sweeps": self.fidelity.sweeps}
        if self.frame.request.wants("fidelity"):
            self.fidelity.check()
        if self.frame.request.wants("audit"):
            require_texts(self.opened.spec)
        self.report.references = self._references()
        try:
            for name, stage in stages.items():
                if self.frame.request.wants(name):
                    with self._timed(name):
                        stage()
        except (KeyboardInterrupt, Interrupted):
            self.report.partial = True
            raise Interrupted("interrupted: the stages that were finished are in the report") from None
        return self.report

    def _references(self) -> list[Reference]:
        opened, shared, split = self.opened, self.frame.shared, self.frame.request.split
        key = ("references", id(opened.datamodule), split, opened.items)
        if key not in shared:
            limit = opened.items if opened.limited else None
            shared[key] = references(opened.datamodule, split, opened.spec, limit)
        return shared[key]

    def audit(self) -> None:
        """Utterances by likelihood, with a picture of how the least likely are aligned."""
        _, likelihood = self.likelihood.of_first_line()
        self.report.audit = audit(self.frame, likelihood)
        picture = picture_of_audit(self.opened, self.report.audit)
        if picture is not None:
            self.pictures["audit"] = picture

    def cost(self) -> None:
        """Network evaluations, samples a second, latency, memory, on this device."""
        if not self.opened.model.generates:
            return
        small = self.opened.limited
        opened, size = self.opened, min(self.frame.request.batch_size, 64)
        found = self.frame.once("cost", self.frame.sampling_settings(), lambda: cost.measure(
            opened.model,
            lambda n, start: draw(opened.model, opened.sampling(n, start=start), batch_size=size, progress=False),
            batch_size=16 if small else 64, budget=5.0 if small else 60.0,
        ))
        self.report.sampling = SamplingCost(**found, seed=self.frame.request.seed)

    def checks(self) -> None:
        """The checks of this checkpoint, and the layers of a flow one by one."""
        model, request, line = self.opened.model, self.frame.request, self.likelihood.lines[0]
        bound = 3600.0 if request.checks == "full" else 10.0 if self.opened.limited else _CHECKS

        def compute() -> dict:
            subject = ModelSubject(
                model, self.opened.evaluated(64).to(model.device), weights_of(request.ema), request.seed, line.options,
                self.likelihood.first, time.monotonic() + bound, self.opened.evaluated(2000).x,
            )
            with tqdm(desc=f"checks of {model.family}", unit="check", mininterval=0.5) as bar:

                def watch(name: str) -> None:
                    bar.set_postfix_str(name)
                    bar.update()

                checks = [check.to_dict() for check in verify_checkpoint(subject, watch)]
            return {"checks": checks, "layers": subject.flow.layers if is_flow(model) else []}

        done = self.frame.once("checks", {"options": line.options, "bound": bound}, compute)
        self.report.checks = [Check(**check) for check in done["checks"]]
        if done["layers"]:
            from genmodels.verification.trained_flows import drift_of  # here, since other families need no flows

            self.report.profile.flow = [Layer(**layer) for layer in done["layers"]]
            self.report.drift = Drift(**drift_of(done["layers"]))
        self.report.failed += [f"check failed: {check.name} ({check.note})" for check in self.report.checks
                               if check.failed]
