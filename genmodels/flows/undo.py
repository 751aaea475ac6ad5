"""All or nothing: what an initialisation that fails has changed is undone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn


@contextlib.contextmanager
def undone_on_failure(module: nn.Module) -> Iterator[None]:
    """A block that leaves parameters and buffers as they were if it raises.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> before = layer.bias.detach().clone()
        >>> try:
        ...     with undone_on_failure(layer):
        ...         _ = nn.init.constant_(layer.bias, 9.0)
        ...         raise ValueError
        ... except ValueError:
        ...     bool((layer.bias == before).all())
        True
    """
    before = {name: value.clone() for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    try:
        yield
    except BaseException:
        module.load_state_dict(before, strict=False)
        raise
