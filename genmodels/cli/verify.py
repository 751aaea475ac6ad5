"""`genmodels verify`: checks of models, layers, noise schedules, samplers, energies and attention."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, RunError, an, as_input_errors
from genmodels.core.files import check_writable, located, place_of, write_text
from genmodels.core.random import seed_of
from genmodels.verification import attention as mechanisms
from genmodels.verification.check import FAILED, NOT_VERIFIED, Findings, Options, counting, table
from genmodels.verification.densities import check_energy, check_schedule
from genmodels.verification.diffusion import check_denoiser, check_sampler, is_sampler
from genmodels.verification.flows import verify_bijection

_ROWS = 3
_INITIAL = 1024
_LISTED = 6  # failed checks in a message
_DIM, _HEADS = 8, 2  # of a user's attention
_MUTANTS = {  # tables in tests/mutants: each mutant is listed with the checks that must detect it
    "bijections": "bijections.MUTANTS", "flows": "models.FLOW_MUTANTS", "models": "models.MUTANTS",
    "schedules and energies": "densities.MUTANTS", "denoisers and samplers": "diffusion.MUTANTS",
    "attention": "attention.MUTANTS",
}  # fmt: skip


def run(
    *,
    model: dict | None = None,
    data: dict | None = None,
    ckpt: str | None = None,
    what: str | None = None,
    object: str | None = None,
    capabilities: list[str] | None = None,
    self_test: bool = False,
    shape: list[int] | None = None,
    options: dict | None = None,
    cond: str | None = None,
    out: str | None = None,
    verbose: bool = False,
    seed: int = 0,
    compiler: Literal["aot_eager", "eager", "inductor", "none"] = "aot_eager",
    max_dims: int = 256,
    patience: float = 60.0,
    ema: bool | float = True,
    device: str = "cpu",
    progress: bool = True,
    trust: list[str] | None = None,
    trainer: dict | None = None,
    logger: dict | None = None,
    checkpoint: dict | None = None,
) -> None:
    """Check numerically that a model, or a part of your own, is correct: flows, diffusion, energies, attention.

    Arguments:
        model: a model as in training; its parameters are drawn at random, then it is initialised on the data.
        data: the data set it is built for.
        ckpt: a checkpoint or run folder instead, with its trained weights.
        what: a bijection, energy, denoiser, noise schedule or sampler of your own instead, package.module:Class or a
            function that returns one; needs trust, and shape except for schedules and samplers. Or attention: all
            mechanisms of this package, or the one given by object.
        object: with what=attention, package.module:factory of your own; factory(dim, heads) makes a module (x, mask).
        capabilities: of that module, as in [relative,cache,causal]; each adds further checks.
        self_test: instead run every check on mutants, deliberately broken objects, and fail if one is not detected;
            needs the source, since the mutants are part of the tests.
        shape: event shape for what, as in shape=[3,8,8]; for attention on maps height and width.
        options: arguments of the class given by what or object.
        cond: condition of what, labels:10, vector:4 or map:2 for classes, length or channels.
        out: file for the results (.json); default verify.json next to a checkpoint, none otherwise.
        verbose: print every check of every layer, also those that do not apply.
        seed: seed of parameters and inputs.
        compiler: backend for the check of torch.compile, none to skip it.
        max_dims: largest event for full Jacobians of all rows; larger events use one row, or a part of the event.
        patience: time limit in seconds for one Jacobian of a larger event, beyond which it is not verified.
        ema: averaged weights (true), raw ones (false), or the average with one decay.
        device: auto, cpu, cuda, ...
        progress: show a progress bar.
        trust: further packages whose classes may be named.
        trainer: not used here; presets and experiments may bring it.
        logger: not used here.
        checkpoint: not used here.
    """
    _check_given({"model": model, "ckpt": ckpt, "what": what, "self_test": self_test or None},
                 {"shape": shape, "options": options, "cond": cond, "object": object, "capabilities": capabilities,
                  "ema": None if ema is True else ema, "device": None if device == "cpu" else device})
    if out is not None or ckpt is not None:
        if (target := _place(out, ckpt)).suffix.lower() != ".json":
            raise InputError(f"out={target}: the results are a file, end it in .json")
        check_writable("out", target)

    start = time.monotonic()
    if self_test:
        detected = _self_test(progress)
        _write({"detected": detected}, out, ckpt)
        print(f"\nevery check detected its mutants: {sum(map(len, detected.values()))} checks in "
              f"{time.monotonic() - start:.0f} s")
        return
    trust, options = trust or [], options or {}
    how = Options(randomise=model is not None, max_dims=max_dims, patience=patience, seed=seed, progress=progress,
                  compiler=None if compiler == "none" else compiler)
    if what is None:
        findings = check_model(model, data, ckpt, ema, device, trust, how)
    elif what != "attention":
        findings = _own(_located(what, trust), what, shape, options, cond, how)
    elif object is None:
        findings = every_mechanism(how)
    else:
        findings = own_attention(_located(object, trust, "object"), object, capabilities or [], shape, options, how)
    print(findings.text(verbose))
    _write(findings.to_dict(), out, ckpt)
    if findings.failed:
        count = f"{len(findings.failed)} check{'' if len(findings.failed) == 1 else 's'} failed"
        raise RunError(f"{count}: {_listed(findings.failed)}{_not_verified('; ', findings)}")
    if not findings.passed:
        raise RunError(f"no check failed, but {_not_verified('', findings)}")
    checks = sum(check.error is not None for report in findings.reports for check in report.checks)
    print(f"\nevery check passed: {checks} checks in {time.monotonic() - start:.0f} s")


def _check_given(subjects: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise InputError unless there is exactly one subject of the checks, with no option that does not apply to it."""
    given = [key for key, value in subjects.items() if value is not None]
    if len(given) != 1:
        problem = f"got {' and '.join(given)}" if given else "no model is given"
        raise InputError(f"{problem}: give one of model=glow, ckpt=<file>, what=package.module:Class or self_test=true")
    what, attention = subjects["what"], subjects["what"] == "attention"
    for useless, keys, partner in (
        (what is None, ("shape", "options", "cond"), "what=package.module:Class"),
        (not attention, ("object", "capabilities"), "what=attention"),
        (attention and options["object"] is None, ("shape", "options", "capabilities"),
         "object=package.module:factory"),
        (subjects["ckpt"] is None, ("ema",), "ckpt=<file>"),
        (what is not None or subjects["self_test"] is not None, ("device",), "a model or ckpt=<file>"),
    ):
        for key in keys:
            if useless and options[key] is not None:
                raise InputError(f"{key} needs {partner}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _not_verified(before: str, findings: Findings) -> str:
    return f"{before}not verified: {_listed(findings.unverified)}" if findings.unverified else ""


def _place(out: str | None, ckpt: str | None) -> Path:
    return Path(out).expanduser() if out is not None else place_of(ckpt).parent / "verify.json"


def _write(results: dict, out: str | None, ckpt: str | None) -> None:
    if out is None and ckpt is None:
        return
    target = _place(out, ckpt)
    write_text(target, json.dumps({"format": 2, **results}, indent=1, allow_nan=False) + "\n")
    print(f"results: {target}")


def check_model(
    model: dict | None, data: dict | None, ckpt: str | None, ema: bool | float, device: str, trust: list[str],
    how: Options,
) -> Findings:  # fmt: skip
    """The checks of a model from configuration, or of a trained one."""
    from genmodels.data.base import spread_rows
    from genmodels.models.build import build
    from genmodels.models.checkpoint import choose_device, data_options, load_model, weights_of
    from genmodels.training.trainer import initial_batch
    from genmodels.verification.checkpoints import verify

    if ckpt is None:
        datamodule = build(data, trust=trust).prepare()
        node, spec = model, datamodule.spec
    else:
        path = located(ckpt)
        network, header = load_model(path, device=device, trust=trust)
        datamodule = build(data_options(header, path), trust=trust).prepare()
        node, spec = header["model"], DataSpec.from_dict(header["data"])
        with as_input_errors():
            network.core.load_state_dict(network.weights(weights_of(ema)).state_dict())

    def fresh(name: str = "fresh"):
        torch.manual_seed(seed_of(how.seed, name))
        return build(node, spec, trust=trust)

    if ckpt is None:
        network = fresh("weights").to(choose_device(device))
    rows = spread_rows(len(datamodule.split("val")), _ROWS)
    batch = datamodule.items("val", rows).to(network.device)
    initial = initial_batch(datamodule, _INITIAL).to(network.device) if ckpt is None else None
    return verify(network, fresh, batch, initial, how)


def _self_test(progress: bool) -> dict[str, dict[str, list[str]]]:
    """Run every check on its mutants, and print by topic which of them it detects.

    Returns:
        The names of the mutants, by topic and check.

    Raises:
        InputError: without the source.
        RunError: when a check misses a mutant, or fails on an object that it should pass.
    """
    source = Path(__file__).resolve().parents[2]
    if not (source / "tests" / "mutants").is_dir():
        raise InputError("self_test needs tests/mutants, which only the source of genmodels has: clone it, "
                         "pip install -e . and repeat the command")
    sys.path.insert(0, str(source))
    tables = {}
    for topic, place in _MUTANTS.items():
        module, _, name = place.partition(".")
        tables[topic] = getattr(importlib.import_module(f"tests.mutants.{module}"), name)
    detected: dict[str, dict[str, list[str]]] = {topic: {} for topic in tables}
    wrong = []
    with counting(sum(map(len, tables.values())), progress, unit="mutant") as watch:
        for topic, name, mutant in ((t, n, m) for t, mutants in tables.items() for n, m in mutants.items()):
            watch(name)
            torch.manual_seed(0)
            found = mutant.run()
            failed = {c.name for c in getattr(found, "checks", found) if c.status in (FAILED, NOT_VERIFIED)}
            expected = mutant.failing | getattr(mutant, "unverified", set())
            wrong += [f"{check} ({topic}: {name})" for check in sorted(failed ^ expected)]
            for check in failed:
                detected[topic].setdefault(check, []).append(name)
    for topic, by_check in detected.items():
        rows = [[check, _listed(by_check[check])] for check in sorted(by_check)]
        print(f"{topic}\n{table(rows, ('check', 'detects'))}\n")
    if wrong:
        raise RunError(f"checks that missed a mutant, or failed where they should pass: {_listed(wrong)}")
    return detected


def _made(maker: Callable, what: str, *args: Any, **options: Any) -> Any:
    try:
        return maker(*args, **options)
    except (TypeError, ValueError) as error:
        hint = "; give them as options.<name>=" if "missing" in str(error) else ""
        raise InputError(f"{what}: {error}{hint}") from error


_KINDS = ("log_snr", "energy", "schedule", "at_log_snr")  # attributes of what is not a bijection


def _own(
    maker: Callable, what: str, shape: list[int] | None, options: dict, cond: str | None, how: Options
) -> Findings:
    """The checks of a user's sampler, noise schedule, denoiser, energy or bijection.

    Arguments:
        maker: a class, a function that makes an object of it, or a sampler that is a function.
        what, shape, options, cond: as given to the command.
        how: options of the checks.

    Raises:
        InputError: when it cannot be made, or a shape or a condition is missing or of no use.
    """
    torch.manual_seed(how.seed)
    if isinstance(maker, type) and not is_sampler(maker) and not any(hasattr(maker, name) for name in _KINDS):
        return _own_bijection(maker, what, shape, options, cond, how)
    ready = is_sampler(maker) and not isinstance(maker, type)
    if ready and options:
        raise InputError(f"{what} is a sampler already: leave options out")
    made = maker if ready else _made(maker, what, **options)
    if is_sampler(made):
        _without("a sampler", shape, cond)
        return Findings([check_sampler(made)])
    if not any(hasattr(made, name) for name in _KINDS):
        return _own_bijection(maker, what, shape, options, cond, how)
    if not isinstance(made, nn.Module):
        raise InputError(f"{what} makes {an(type(made).__name__)}, not a torch module")
    if hasattr(made, "log_snr"):
        _without("a noise schedule", shape, cond)
        return Findings([check_schedule(made)])
    if not shape or min(shape) < 1:
        raise InputError("shape is missing, the event shape of x: add for example shape=[2]")
    if hasattr(made, "schedule"):
        return Findings([check_denoiser(made, shape, cond=_condition(cond, shape, how.seed), seed=how.seed)])
    _without("an energy", None, cond)
    return Findings([check_energy(made, shape, seed=how.seed)])


def _without(kind: str, shape: list[int] | None, cond: str | None) -> None:
    if shape:
        raise InputError(f"{kind} has no shape: leave shape={shape} out")
    if cond is not None:
        raise InputError(f"{kind} is checked without a condition: leave cond out")


def _own_bijection(
    maker: Callable, what: str, shape: list[int] | None, options: dict, cond: str | None, how: Options
) -> Findings:
    if not shape:
        raise InputError("shape is missing, the event shape of x: add for example shape=[3,8,8]")
    if min(shape) < 1:
        raise InputError(f"shape must hold positive sizes, got {shape}")

    def make() -> nn.Module:
        made = _made(maker, what, **options)
        if not isinstance(made, nn.Module) or not callable(getattr(made, "inverse", None)):
            raise InputError(f"{what} makes {an(type(made).__name__)}, not a module with forward and inverse")
        return made

    torch.manual_seed(how.seed)
    conditions = _condition(cond, shape, how.seed)
    if conditions is not None and not _takes_cond(make()):
        raise InputError(f"cond={cond} goes with a bijection that uses a condition; {what} makes one that uses none "
                         "(uses_cond is false, or forward has no cond): leave cond out")
    torch.manual_seed(how.seed)
    with as_input_errors(what):
        return verify_bijection(make, shape, conditions, how)


def _takes_cond(layer: nn.Module) -> bool:
    """Whether a bijection uses a condition: by its `uses_cond`, else by the signature of `forward`."""
    return bool(getattr(layer, "uses_cond", "cond" in inspect.signature(layer.forward).parameters))


def _located(what: str, trust: list[str], key: str = "what") -> Callable:
    """The class or function of a trusted package that `package.module:name` names."""
    module_name, _, name = what.replace(":", ".").rpartition(".")
    package = module_name.split(".")[0]
    if not package:
        raise InputError(f"{key}={what} names no class: {key}=package.module:Class")
    if package not in {"genmodels", *trust}:
        raise InputError(f"{key}={what} is not of genmodels; to allow it add its package: trust=[{package}]")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m genmodels` has it
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{key}={what} cannot be found ({type(error).__name__}: {error})") from error
    if not callable(found) or getattr(found, "__module__", "").split(".")[0] != package:
        raise InputError(f"{key}={what} is no class or function defined in {package}")
    return found


def _condition(cond: str | None, shape: list[int], seed: int) -> Tensor | None:
    """Different conditions for a few rows, of a kind and size given as `labels:10`."""
    if cond is None:
        return None
    kind, _, size = cond.partition(":")
    if kind not in ("labels", "vector", "map") or not size.isdigit() or int(size) < 1:
        raise InputError(f"cond must be labels:<classes>, vector:<length> or map:<channels>, got {cond}")
    if kind == "labels":
        return torch.arange(_ROWS) % int(size)
    space = shape[1:] if kind == "map" else []
    return torch.randn(_ROWS, int(size), *space, generator=torch.Generator().manual_seed(seed))


def every_mechanism(how: Options) -> Findings:
    """The checks of all attention mechanisms of the package."""
    findings = mechanisms.Survey()
    with counting(len(mechanisms.MECHANISMS) * len(mechanisms.CHECKS.specs), how.progress) as watch:
        for name, mechanism in mechanisms.MECHANISMS.items():
            findings.wholes.append(mechanism.check(name, compiler=how.compiler, seed=how.seed, watch=watch))
    return findings


def own_attention(
    maker: Callable, what: str, capabilities: list[str], space: list[int] | None, options: dict, how: Options
) -> Findings:
    """The checks of the module of a user's factory, `factory(dim, heads, ...)`."""
    sizes = {"dim": _DIM, "heads": _HEADS, **options}
    dim, heads = sizes.pop("dim"), sizes.pop("heads")
    if space is not None and (len(space) != 2 or min(space) < 1):
        raise InputError(f"shape is that of a map here, as in shape=[2,3], got {space}")

    def make(**more: Any) -> nn.Module:
        made = _made(maker, what, dim, heads, **{**sizes, **more})
        if not isinstance(made, nn.Module):
            raise InputError(f"{what} makes {an(type(made).__name__)}, not a module (x, mask) -> y")
        return made

    longest = inspect.signature(maker).parameters.get("max_len")
    usual = None if longest is None else sizes.get("max_len", longest.default)
    fresh = (lambda: make(max_len=2 * usual)) if isinstance(usual, int) else None
    torch.manual_seed(how.seed)
    module = make()
    with counting(len(mechanisms.CHECKS.specs), how.progress) as watch, as_input_errors(what):
        return Findings([mechanisms.check(
            module, dim, capabilities=capabilities, space=None if space is None else tuple(space), fresh=fresh,
            compiler=how.compiler, seed=how.seed, watch=watch,
        )])  # fmt: skip
