"""One path that judges every family: the same items, the same integers, the same weights, one result."""

from __future__ import annotations

import hashlib
import inspect
import platform
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
from tqdm import tqdm

from genmodels import __version__
from genmodels.data.spec import DataSpec
from genmodels.errors import InputError, RunError
from genmodels.evaluation.likelihood import Likelihood
from genmodels.evaluation.references import best_histogram, uniform_bits_per_dim

_AUTO_BUDGET = 100_000  # network evaluations that `draws=auto` spends on a bound, as far as 5 to 100 strata allow


def likelihood_of(model, datamodule, split: str, *, batch_size: int, limit: int | None = None, **options) -> Likelihood:
    """The likelihood of a whole split, item by item in index order, with a progress bar.

    Raises:
        InputError: when the items do not fit the model's DataSpec.
    """
    indices = None if limit is None else torch.arange(min(limit, len(datamodule.split(split))))
    parts = []
    for batch in tqdm(datamodule.loader(split, batch_size, indices), desc=f"{model.family} on {split}", unit="batch"):
        try:
            model.spec.check(batch)
        except ValueError as error:
            raise InputError(str(error)) from error
        parts.append(model.log_likelihood(batch.to(model.device), **options).cpu())
    return Likelihood.concatenate(parts).in_index_order()


def item_hash(datamodule, split: str, limit: int | None = None) -> str:
    """A hash of the items judged: their indices, values and labels."""
    indices = None if limit is None else torch.arange(min(limit, len(datamodule.split(split))))
    digest = hashlib.sha256()
    for batch in datamodule.loader(split, 1024, indices):
        for tensor in (batch.index, batch.x, batch.cond):
            if tensor is not None:
                digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def references(datamodule, split: str, spec: DataSpec, limit: int | None = None) -> list[dict]:
    """Bits/dim of the uniform model and of the best per-pixel histogram; the exact entropy where it is known."""
    if spec.levels is None:
        known = spec.entropy is not None
        return [{"name": "exact entropy", "unit": "nats", "value": spec.entropy}] if known else []
    rows = [{"name": "uniform", "unit": "bits_per_dim", "value": uniform_bits_per_dim(spec.levels)}]
    if spec.dims * spec.levels <= 2_000_000:
        train, val, judged = (
            torch.cat([b.x for b in datamodule.loader(name, 4096)]) for name in ("train", "val", split)
        )
        nats = best_histogram(train, val, spec.levels).log_prob(judged[:limit])
        likelihood = Likelihood(nats, "exact", spec.dims, spec.levels)
        value = likelihood.mean_bits_per_dim()
        rows.append({"name": "best per-pixel histogram", "unit": "bits_per_dim", "value": value})
    return rows


def judge(
    path: Path, *, split: str, draws: int | str, replicates: int, importance_samples: list[int], batch_size: int,
    limit: int | str | None, seed: int, ema: bool | float, data: dict, device: str, trust: list[str],
    partition: dict | None = None,
) -> dict:
    """The report of one checkpoint: plain types only.

    Raises:
        InputError, RunError: one line, as the commands want it.
    """
    from genmodels.models.build import build
    from genmodels.models.load import load_model, weights_of
    from genmodels.training.archive import checkpoint_hash

    start = time.monotonic()
    model, header = load_model(path, device=device, trust=trust)
    if not header["config"].get("data"):
        raise RunError(f"{path}: it does not say which data it was trained on; give data._target_ and its options")
    datamodule = build({**header["config"]["data"], **data}, trust=trust).prepare()
    fits(model.spec, datamodule.spec)
    if limit is None:
        limit = header["config"].get("trainer", {}).get("limit_evaluation")
    limit = None if limit == "all" else limit
    items = len(datamodule.split(split)) if limit is None else min(limit, len(datamodule.split(split)))
    options: dict = {"weights": weights_of(ema), "seed": seed}
    variants: list[dict] = [{}]
    known = inspect.signature(model.log_likelihood).parameters
    if "importance_samples" in known:
        # An exact density needs no importance samples: one line says it all.
        variants = [{"importance_samples": k} for k in (importance_samples if model.spec.levels else [1])]
    elif importance_samples != [1]:
        raise InputError(f"importance_samples is for flows and energies, {path} holds a {model.family}")
    if "draws" in known:
        if draws == "auto":
            draws = automatic_draws(items, model.num_steps - 1, replicates)
        if isinstance(draws, int) and draws >= model.num_steps:
            raise InputError(f"draws must lie in 1..{model.num_steps - 1}, the terms of the bound, got {draws}")
        options |= {"draws": None if draws == "all" else draws, "replicates": replicates}
    elif draws not in ("auto", "all"):
        raise InputError(f"draws is for diffusion bounds, {path} holds a {model.family}")
    if "normaliser" in known:
        options |= chosen_partition(partition or {}, limit is not None)
    elif partition:
        raise InputError(f"{', '.join(partition)} is for energies, {path} holds a {model.family}")
    rows, failed = [], []
    for variant in variants:
        try:
            likelihood = likelihood_of(
                model, datamodule, split, batch_size=batch_size, limit=limit, **options, **variant
            )
        except InputError:
            raise
        except ValueError as error:
            raise InputError(str(error)) from error
        now = time.monotonic()
        rows.append({**row(likelihood, model.spec), "seconds": now - start})
        start = now
        if len(likelihood.nonfinite) and likelihood.kind != "unnormalised":
            listed = ", ".join(str(int(i)) for i in likelihood.nonfinite[:3])
            count = f"{len(likelihood.nonfinite)} of {len(likelihood)}"
            failed.append(f"{count} likelihoods are not finite (first items: {listed})")
    return {
        "format": 1,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "genmodels": {
            "version": __version__, "torch": torch.__version__, "python": platform.python_version(),
            "device": str(model.device), "threads": torch.get_num_threads(),
        },
        "checkpoint": {
            "path": str(path), "sha256": checkpoint_hash(path), "step": header["step"], "family": header["family"],
            "parameters": header["parameters"], "weights": str(options["weights"]),
        },
        "config": header["config"],
        "data": {
            "name": model.spec.name, "split": split, "items": items, "limited": limit is not None,
            "item_hash": item_hash(datamodule, split, limit), "event_shape": list(model.spec.event_shape),
            "levels": model.spec.levels, "units": "levels" if model.spec.levels else "the data's own",
        },
        "likelihood": rows,
        "references": references(datamodule, split, model.spec, limit),
        "profile": profile_of(likelihood),
        "failed": failed,
        "seconds": {"likelihood": sum(entry["seconds"] for entry in rows)},
    }


def automatic_draws(items: int, terms: int, replicates: int) -> int | str:
    """`all` terms of a bound where that is cheap, else the number of strata that fits the budget, from 5 to 100.

    Example:
        >>> automatic_draws(50, 999, 2), automatic_draws(360, 999, 2), automatic_draws(10_000, 999, 2)
        ('all', 100, 5)
    """
    if items * terms <= _AUTO_BUDGET:
        return "all"
    return min(terms, max(5, min(100, _AUTO_BUDGET // (items * replicates))))


def chosen_partition(given: dict, limited: bool) -> dict:
    """How log Z is found, where it needs annealed importance sampling: with less effort where few items are judged.

    Example:
        >>> chosen_partition({"chains": 32}, True)
        {'normaliser': 'auto', 'chains': 32, 'densities': 50}
    """
    usual = {"chains": 64, "densities": 50} if limited else {"chains": 256, "densities": 1000}
    return {"normaliser": "auto", **usual, **given}


def fits(wanted: DataSpec, found: DataSpec) -> None:
    """Raise an InputError with both values when data do not fit the checkpoint's DataSpec."""
    for key in ("event_shape", "levels", "num_classes"):
        then, now = getattr(wanted, key), getattr(found, key)
        if then != now:
            raise InputError(f"these data do not fit the checkpoint: {key} is {now}, the model was built for {then}")


def row(likelihood: Likelihood, spec: DataSpec) -> dict:
    """One likelihood as plain values: mean, errors, the worst items, the named parts, and how it was made."""
    worst = likelihood.nats.argsort()[:5]
    unit = {} if spec.levels is None else {
        "bits_per_dim": likelihood.mean_bits_per_dim(),
        "se_data": likelihood.se_data_bits_per_dim(),
        "se_mc": likelihood.se_mc_bits_per_dim(),
    }
    mean = likelihood.mean_nats()
    if spec.levels is None:
        unit = {
            "nll": None if mean is None else -mean,
            "nll_per_dim": None if mean is None else -mean / spec.dims,
            "se_data": likelihood.se_data_nats(),
            "se_mc": likelihood.se_mc_nats(),
        }
        if spec.entropy is not None and mean is not None:
            unit |= {"entropy": spec.entropy, "kl_gap": -mean - spec.entropy}
    reason = {} if mean is not None else {"reason": "not finite"}
    if likelihood.kind == "unnormalised":  # of no use beside others, so no figure that could stand beside theirs
        unit, reason = {name: None for name in unit}, {"reason": likelihood.made["reason"]}
    return {
        "kind": likelihood.kind, "mark": likelihood.mark, "mean_nats": mean, **unit, **reason,
        "n": len(likelihood), "nonfinite": len(likelihood.nonfinite),
        "worst": [{"index": int(i), "nats": float(likelihood.nats[i])} for i in worst],
        "parts_nats": {name: float(value.double().mean()) for name, value in likelihood.parts.items()},
        "made": likelihood.made,
    }


def profile_of(likelihood: Likelihood) -> dict:
    """The bound by noise level: mean nats of an item that each log-SNR bin costs."""
    if likelihood.profile is None:
        return {}
    profile = likelihood.profile
    return {"diffusion": {
        "log_snr_edges": profile.edges.tolist(),
        "nats": (profile.nats / profile.items).tolist(),
    }}
