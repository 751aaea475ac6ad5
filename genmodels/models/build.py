"""From configuration to objects: only classes of genmodels, and of packages that the user trusts."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Set
from contextvars import ContextVar
from types import FrameType
from typing import Any

from genmodels.core.checkpoint import present_name
from genmodels.core.errors import InputError, OptionError, require_known

TARGET = "_target_"
#: Networks of denoisers, and an encoder of recognisers, by the name that `model.net=` takes on the command line.
NETWORKS = {
    "dit": "genmodels.nn.dit.DiT",
    "mlp": "genmodels.nn.perceptron.MLPDenoiser",
    "pyramid": "genmodels.speech.criteria.PyramidalLSTM",
    "unet": "genmodels.nn.unet.UNet",
}


#: The packages of which classes were located in this process.
USED_PACKAGES: set[str] = set()


def locate(name: str, trust: Iterable[str] = ()) -> type:
    """The class `package.module.Class`, which must be defined in that module of a trusted package.

    A checkpoint names the class of its model; without this rule a name such as `genmodels.cli.os.system` would reach
    any function of the interpreter.

    Raises:
        InputError: for a package that is not trusted, or a name that is not a class defined in its module.

    Example:
        >>> locate("genmodels.models.optimizer.Optimizer").__name__
        'Optimizer'
        >>> locate("os.system")
        Traceback (most recent call last):
        ...
        genmodels.core.errors.InputError: 'os.system' is not a class of genmodels; ...
    """
    name = present_name(str(name))
    package = name.split(".")[0]
    if package not in {"genmodels", *trust}:
        raise InputError(f"{name!r} is not a class of genmodels; to allow it add its package: trust=[{package}]")
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
        found = vars(module)[attribute]
    except (ImportError, KeyError, ValueError) as error:
        raise InputError(f"{name!r} cannot be found ({type(error).__name__}: {error})") from error
    if not inspect.isclass(found) or found.__module__.split(".")[0] != package:
        raise InputError(f"{name!r} is not a class defined in {package}")
    USED_PACKAGES.add(package)
    return found


#: The packages trusted by the `build` under way, for the networks that a model builds in its constructor.
_TRUSTED: ContextVar[Set[str]] = ContextVar("_TRUSTED", default=frozenset())


def build(node: dict, *args: Any, trust: Iterable[str] = ()) -> Any:
    """The object that a configuration node describes: `{_target_: dotted.Class, option: value, ...}`.

    Raises:
        InputError: for an unknown option (naming the nearest known one), or a value that the constructor refuses.
    """
    options = {key: value for key, value in node.items() if key != TARGET}
    if TARGET not in node:
        raise InputError(f"no {TARGET} among {', '.join(node)}: which class is meant?")
    outer = _TRUSTED.set({*trust, *_TRUSTED.get()})
    try:
        return construct(locate(node[TARGET], _TRUSTED.get()), *args, **options)
    finally:
        _TRUSTED.reset(outer)


def make_network(options: dict | None, event_shape: tuple[int, ...], *args: Any) -> Any:
    """The network of a denoiser: of the class `_target_`, by default an MLP for vectors and a U-Net for other data.

    Arguments:
        options: keyword options of the network, None for its defaults.
        event_shape: shape of an item of the data.
        args: its further arguments: number of classes, doubled output, extra channels, two times.

    Example:
        >>> type(make_network({TARGET: NETWORKS["dit"], "depth": 1}, (1, 8, 8))).__name__
        'DiT'
    """
    usual = NETWORKS["mlp" if len(event_shape) == 1 else "unet"]
    return build({TARGET: usual, **(options or {})}, event_shape, *args)


def keywords(cls: type) -> list[str]:
    """The keyword-only arguments of a class, and those of its bases if it passes `**` arguments on to them.

    Example:
        >>> from genmodels.models.normalizing_flows import Glow
        >>> [name in keywords(Glow) for name in ("steps", "ema_decay", "shared")]
        [True, True, False]
    """
    names: list[str] = []
    for one in cls.__mro__:
        parameters = inspect.signature(one.__init__).parameters.values()
        names += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in names]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return names


def altered(cls: type, options: dict) -> list[str]:
    """The names of the options whose values are not the defaults of a class.

    Example:
        >>> from genmodels.models.optimizer import Optimizer
        >>> altered(Optimizer, {"lr": 0.5, "name": Optimizer.name})
        ['lr']
    """
    known = inspect.signature(cls).parameters
    return [key for key, value in options.items() if key not in known or value != known[key].default]


def options_given(made: Any, frame: FrameType) -> dict[str, Any]:
    """The options of an object under construction: those of the `__init__` in `frame` and of its subclasses."""
    found: dict[str, Any] = {}
    while frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is made:
        arguments = inspect.getargvalues(frame)
        values = {name: arguments.locals[name] for name in arguments.args if name not in ("self", "spec")}
        found |= values | (arguments.locals[arguments.keywords] if arguments.keywords else {})
        frame = frame.f_back
    return found


def construct(cls: type, *args: Any, **options: Any) -> Any:
    """`cls(*args, **options)`, with an unknown option answered by the nearest known one."""
    require_known(cls.__name__, options, keywords(cls))
    try:
        return cls(*args, **options)
    except OptionError as error:
        whole = "." in str(error).split()[0]  # the key of a setting, such as data.size
        raise InputError(str(error) if whole else f"{cls.__name__}: {error}") from error
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        raise InputError(f"{cls.__name__}: {error}") from error
