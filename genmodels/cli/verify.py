"""`genmodels verify`: is a model, a layer, a sampler, an attention what it says it is? A verdict for every law."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from genmodels.evaluation.findings import Findings, Options

_ROWS = 3
_INITIAL = 1024


def run(
    *,
    model: dict | None = None,
    data: dict | None = None,
    ckpt: str | None = None,
    what: str | None = None,
    object: str | None = None,
    capabilities: list[str] | None = None,
    shape: list[int] | None = None,
    options: dict | None = None,
    cond: str | None = None,
    out: str | None = None,
    self_test: bool = False,
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
    """Prove a model or a part of your own against its laws: flows, diffusion, energies, attention.

    Arguments:
        model: a model as in training; its parameters are drawn at random, then it is initialised on the data.
        data: the data set it is built for.
        ckpt: a checkpoint or run folder instead: its trained weights as they are.
        what: a bijection, energy, denoiser, noise schedule or sampler of your own instead, package.module:Class or a
            function that returns one; needs trust, and shape but for schedules and samplers. Or attention: every
            mechanism of this package, or the one that object names.
        object: with what=attention, package.module:factory of your own; factory(dim, heads) makes a module (x, mask).
        capabilities: what that module says of itself, as in [relative,cache,causal]; each names further laws.
        shape: event shape for what, as in shape=[3,8,8]; of attention on maps height and width.
        options: arguments of the class that what or object names.
        cond: condition of what, labels:10, vector:4 or map:2 for classes, length or channels.
        out: file for the verdicts; default verify.json beside a checkpoint, none otherwise.
        self_test: show that every law notices the errors planted for it; with what=attention those of attention.
        verbose: every law of every layer, also those that do not apply.
        seed: seed of parameters and inputs.
        compiler: backend for the law on torch.compile, none to leave it out.
        max_dims: largest event of which a whole Jacobian is made of every row; of larger ones of one row, or of a part.
        patience: seconds that one Jacobian of a larger event may take; what takes longer is not proven.
        ema: averaged weights (true), raw ones (false), or the average of one decay.
        device: auto, cpu, cuda, ...
        progress: whether a bar is shown.
        trust: further packages whose classes may be named.
        trainer: not used here; presets and experiments may bring it.
        logger: not used here.
        checkpoint: not used here.
    """
    from genmodels.errors import InputError, RunError
    from genmodels.evaluation.findings import Options

    attention = what == "attention"
    chosen = {"model": model, "ckpt": ckpt, "what": what, "self_test": (self_test and not attention) or None}
    given = [key for key, value in chosen.items() if value is not None]
    if len(given) != 1:
        said = f"got {' and '.join(given)}" if given else "nothing was named"
        raise InputError(f"{said}: give one of model=glow, ckpt=<file>, what=package.module:Class or self_test=true")
    for key, value in (("shape", shape), ("options", options), ("cond", cond)):
        if value is not None and what is None:
            raise InputError(f"{key} goes with what=package.module:Class")
    for key, value in (("object", object), ("capabilities", capabilities)):
        if value is not None and not attention:
            raise InputError(f"{key} goes with what=attention")
    for key, value in (("shape", shape), ("options", options), ("capabilities", capabilities)):
        if value is not None and attention and object is None:
            raise InputError(f"{key} goes with object=package.module:factory")
    if max_dims < 1:
        raise InputError(f"max_dims must be at least 1, got {max_dims}")
    if not patience > 0:
        raise InputError(f"patience must be positive, got {patience}")

    import time

    start = time.monotonic()
    backend = None if compiler == "none" else compiler
    how = Options(model is not None, max_dims, patience, backend, seed, progress)
    if self_test:
        findings = _planted(backend, verbose, attention)
    elif attention:
        from genmodels.cli import verify_attention

        chosen_how = {"compiler": backend, "seed": seed, "progress": progress}
        if object is None:
            findings = verify_attention.every_mechanism(**chosen_how)
        else:
            maker = _located(object, trust or [], "object")
            findings = verify_attention.own(maker, object, capabilities or [], shape, options or {}, **chosen_how)
    elif what is not None:
        findings = _own(what, shape, options or {}, cond, trust or [], how)
    else:
        findings = _model(model, data, ckpt, ema, device, trust or [], how)
    if findings is not None:
        print(findings.text(verbose))
        _write(findings, out, ckpt)
        if findings.failures:
            more = f" and {len(findings.failures) - 6} more" if len(findings.failures) > 6 else ""
            count = f"{len(findings.failures)} law{'' if len(findings.failures) == 1 else 's'} broken"
            raise RunError(f"{count}: {', '.join(findings.failures[:6])}{more}{_not_proven('; ', findings)}")
        if not findings.passed:
            raise RunError(f"no law is broken, but {_not_proven('', findings)}")
        checks = sum(v.error is not None for report in findings.reports for v in report.verdicts)
        print(f"\nevery law holds: {checks} checks in {time.monotonic() - start:.0f} s")


def _not_proven(before: str, findings: Findings) -> str:
    more = f" and {len(findings.unproven) - 6} more" if len(findings.unproven) > 6 else ""
    return f"{before}NOT PROVEN: {', '.join(findings.unproven[:6])}{more}" if findings.unproven else ""


def _write(findings, out: str | None, ckpt: str | None) -> None:
    import json
    from pathlib import Path

    from genmodels.files import write_whole

    if out is None and ckpt is None:
        return
    place = Path(ckpt or ".")
    target = Path(out) if out is not None else (place if place.is_dir() else place.parent) / "verify.json"
    text = json.dumps({"format": 1, **findings.to_dict()}, indent=1, allow_nan=False)
    write_whole(target, lambda file: file.write(text + "\n"), mode="w")
    print(f"verdicts: {target}")


def _planted(compiler: str | None, verbose: bool, attention: bool) -> None:
    """The planted errors, one line for each; a RunError if one goes unnoticed."""
    from genmodels.errors import RunError

    if attention:
        from genmodels.evaluation.planted_attention import self_test
    else:
        from genmodels.evaluation.planted import self_test

    missed = []
    found = self_test(compiler)
    if not attention:
        from genmodels.evaluation import planted_diffusion, planted_kinds

        tables = planted_kinds.PLANTED, planted_diffusion.PLANTED
        found = chain(found, *map(planted_kinds.self_test, tables))
    for name, planted, report, right in found:
        told = ", ".join(report.broken) or "every law holds"
        print(f"{'as it must' if right else 'WRONG':<11} {name:<40} {told}", flush=True)
        if verbose:
            print(f"{report}\n")
        if not right:
            missed.append(f"{name} (expected {', '.join(sorted(planted.broken)) or 'no law broken'})")
    if missed:
        raise RunError(f"the laws are wrong about {'; '.join(missed)}")


def _model(
    model: dict | None, data: dict | None, ckpt: str | None, ema: bool | float, device: str, trust: list[str],
    how: Options,
) -> Findings:  # fmt: skip
    """The proof of a model from configuration, or of a trained one."""
    from pathlib import Path

    import torch

    from genmodels.data.base import spread_rows
    from genmodels.data.spec import DataSpec
    from genmodels.evaluation.proofs import prove
    from genmodels.models.build import build
    from genmodels.models.load import choose_device, data_options, load_model, weights_of
    from genmodels.random import seed_of
    from genmodels.training.stream import initial_batch

    if ckpt is None:
        datamodule = build(data, trust=trust).prepare()
        node, spec = model, datamodule.spec
    else:
        path = Path(ckpt).expanduser()
        path = path / "best.ckpt" if path.is_dir() else path
        network, header = load_model(path, device=device, trust=trust)
        datamodule = build(data_options(header, path), trust=trust).prepare()
        node, spec = header["model"], DataSpec.from_dict(header["data"])
        try:
            network.core.load_state_dict(network.weights(weights_of(ema)).state_dict())
        except ValueError as error:
            from genmodels.errors import InputError

            raise InputError(str(error)) from error

    def fresh(name: str = "fresh"):
        torch.manual_seed(seed_of(how.seed, name))
        return build(node, spec, trust=trust)

    if ckpt is None:
        network = fresh("weights").to(choose_device(device))
    rows = spread_rows(len(datamodule.split("val")), _ROWS)
    batch = next(iter(datamodule.loader("val", _ROWS, rows))).to(network.device)
    initial = initial_batch(datamodule, _INITIAL).to(network.device) if ckpt is None else None
    return prove(network, fresh, batch, initial, how)


def _own(
    what: str, shape: list[int] | None, options: dict, cond: str | None, trust: list[str], how: Options
) -> Findings:
    """The proof of something of a user's own."""
    from genmodels.cli import verify_kinds
    from genmodels.errors import InputError

    maker = _located(what, trust)
    condition = None if cond is None else lambda: _condition(cond, shape, how.seed)
    other = verify_kinds.own(maker, what, shape, options, condition, how.seed)
    if other is not None:
        return other
    if not shape:
        raise InputError("shape is missing, the event shape of x: add for example shape=[3,8,8]")
    if min(shape) < 1:
        raise InputError(f"shape must hold positive sizes, got {shape}")

    import torch

    from genmodels.evaluation.proofs_of_flows import prove_bijection

    def make() -> nn.Module:
        try:
            made = maker(**options)
        except (TypeError, ValueError) as error:
            raise InputError(f"{what}: {error}") from error
        if not isinstance(made, torch.nn.Module) or not callable(getattr(made, "inverse", None)):
            raise InputError(f"{what} makes a {type(made).__name__}, not a module with forward and inverse")
        return made

    torch.manual_seed(how.seed)
    conditions = _condition(cond, shape, how.seed)
    if conditions is not None and not _takes_cond(make()):
        raise InputError(f"cond={cond} goes with a bijection that uses a condition; {what} makes one that uses none "
                         "(uses_cond is false, or forward has no cond): leave cond out")
    torch.manual_seed(how.seed)
    try:
        return prove_bijection(make, shape, conditions, how)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{what}: {error}") from error


def _takes_cond(layer: nn.Module) -> bool:
    """Whether a bijection uses a condition, by its own word or, where it says nothing, by its signature."""
    import inspect

    parameters = inspect.signature(layer.forward).parameters
    return bool(getattr(layer, "uses_cond", "cond" in parameters))


def _located(what: str, trust: list[str], key: str = "what"):
    """The class or function of a trusted package that `package.module:name` names."""
    import importlib
    import os
    import sys

    from genmodels.errors import InputError

    module_name, _, name = what.replace(":", ".").rpartition(".")
    package = module_name.split(".")[0]
    if package not in {"genmodels", *trust}:
        raise InputError(f"{key}={what} is not of genmodels; to allow it add its package: trust=[{package or what}]")
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
    """Unlike conditions for a few rows, of a kind and size given as `labels:10`."""
    import torch

    from genmodels.errors import InputError

    if cond is None:
        return None
    kind, _, size = cond.partition(":")
    if kind not in ("labels", "vector", "map") or not size.isdigit() or int(size) < 1:
        raise InputError(f"cond must be labels:<classes>, vector:<length> or map:<channels>, got {cond}")
    if kind == "labels":
        return torch.arange(_ROWS) % int(size)
    space = shape[1:] if kind == "map" else []
    return torch.randn(_ROWS, int(size), *space, generator=torch.Generator().manual_seed(seed))
