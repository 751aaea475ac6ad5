"""`genmodels evaluate`: the likelihood of a split, with its kind, its error and how it was made."""

from __future__ import annotations

from typing import Literal


def run(
    *,
    ckpt: str | list[str],
    split: Literal["train", "val", "test"] = "test",
    out: str | None = None,
    draws: int | Literal["auto", "all"] = "auto",
    replicates: int = 2,
    importance_samples: int | list[int] = 1,
    normaliser: Literal["auto", "quadrature", "ais", "none"] | None = None,
    chains: int | None = None,
    densities: int | None = None,
    batch_size: int = 256,
    limit: int | Literal["all"] | None = None,
    seed: int = 0,
    ema: bool | float = True,
    data: dict | None = None,
    device: str = "auto",
    trust: list[str] | None = None,
) -> None:
    """Judge trained models on a split of their data.

    Arguments:
        ckpt: a checkpoint, a run folder, or a list of them.
        split: train, val or test.
        out: the report's file (one checkpoint) or folder (several); default report.json beside each checkpoint.
        draws: terms of a diffusion bound: all of them, or a number of strata with one term each; auto is all where that
            takes at most 100,000 network evaluations, else 5 to 100 strata.
        replicates: repetitions of the stratified estimate, at least 2, for its standard error.
        importance_samples: dequantisations of each item by a flow or an energy, K; a list gives one line for each K.
        normaliser: how log Z of an energy is found; default quadrature in one and two dimensions, else annealed
            importance sampling (ais); none leaves the energy alone.
        chains: chains of annealed importance sampling; default 256, 64 where limit is set.
        densities: densities between its base and the model; default 1,000, 50 where limit is set.
        batch_size: items judged at once.
        limit: judge the first items of the split only (the report says so), or all; default as the run was configured,
            all unless trainer.limit_evaluation says otherwise.
        seed: seed of the noise.
        ema: averaged weights (true), raw ones (false), or the average of one decay.
        data: options of the data set that differ from training, such as data.root.
        device: auto, cpu, cuda, ...
        trust: further packages whose classes a checkpoint may name.
    """
    from pathlib import Path

    from genmodels.errors import InputError, RunError

    paths = [Path(p) for p in ([ckpt] if isinstance(ckpt, str) else ckpt)]
    if not paths:
        raise InputError("ckpt=[] names no checkpoint")
    for key, value, least in (("batch_size", batch_size, 1), ("replicates", replicates, 2)):
        if value < least:
            raise InputError(f"{key} must be at least {least}, got {value}")
    counts = [importance_samples] if isinstance(importance_samples, int) else importance_samples
    partition = {"normaliser": normaliser, "chains": chains, "densities": densities}
    partition = {key: value for key, value in partition.items() if value is not None}
    numbers = [("limit", [limit]), ("draws", [draws]), ("importance_samples", counts or [0])]
    for key, values in (*numbers, ("chains", [chains]), ("densities", [densities])):
        for value in values:
            if isinstance(value, int) and value < 1:
                raise InputError(f"{key} must be at least 1, got {value}")

    from genmodels.training.archive import verify

    paths = [p / "best.ckpt" if p.is_dir() else p for p in paths]
    failures = []
    for path in paths:
        try:
            verify(path)
        except RunError as error:
            failures.append(str(error))
    if len(failures) == len(paths):
        raise RunError("; ".join(failures))

    from genmodels.evaluation.evaluate import judge
    from genmodels.evaluation.report import report_target, table, write_report
    from genmodels.training.loggers import LoggerOptions, log_evaluation

    reports = []
    for path in paths:
        try:
            report = judge(
                path, split=split, draws=draws, replicates=replicates, importance_samples=counts,
                batch_size=batch_size, limit=limit, seed=seed, ema=ema, data=data or {}, device=device,
                trust=trust or [], partition=partition,
            )
        except RunError as error:
            failures = [*failures, str(error)] if str(error) not in failures else failures
            continue
        reports.append(report)
        judged = report["data"]["items"] if report["data"]["limited"] else None
        target = report_target(path, out, len(paths) > 1, split, judged)
        write_report(report, target)
        report["written"] = str(target)
        log_evaluation(path.parent, LoggerOptions(**report["config"].get("logger", {})), report)
    print(table(reports))
    for report in reports:
        print(f"report: {report['written']}")
        failures += [f"{report['checkpoint']['path']}: {note}" for note in report["failed"]]
    if failures:
        raise RunError("; ".join(failures))
