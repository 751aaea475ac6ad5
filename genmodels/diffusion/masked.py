"""Masked discrete diffusion: a network that fills in masked tokens, its bound on the likelihood, and its samplers.

A predictor is a function `(tokens (B, *event) int64, cond (B,) or None) -> log p (B, *event, V)`, normalised over the V
values. Tokens are 0 .. V-1, and V is the mask, which is never predicted. Tokens that are not masked stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from genmodels.core.errors import at_least, require_finite_rows
from genmodels.core.random import Generator, KeyedGenerator, at_step, uniform
from genmodels.core.tensors import event_sum, rows_for
from genmodels.diffusion.bound import draws_in_strata, packed

Predictor = Callable[[Tensor, Tensor | None], Tensor]
MaskingName = Literal["linear", "cosine", "quadratic"]
#: alpha(t), the share of tokens that is not masked, from 1 at t = 0 to 0 at t = 1, and its derivative.
MASKINGS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "linear": lambda t: (1 - t, -torch.ones_like(t)),
    "cosine": lambda t: (1 - torch.sin(math.pi / 2 * t), -math.pi / 2 * torch.cos(math.pi / 2 * t)),
    "quadratic": lambda t: (1 - t.square(), -2 * t),
}


def masked_nll(predict: Predictor, x: Tensor, hidden: Tensor, mask: int, cond: Tensor | None = None) -> Tensor:
    """(B,) float64, -sum log p(x_i | unmasked tokens) over the masked tokens, in nats.

    Arguments:
        x: tokens (B, *event) int64.
        hidden: which of them are masked, (B, *event) bool.
        mask: the token V.

    Example:
        >>> def coin(tokens, cond):
        ...     return torch.full((*tokens.shape, 2), 0.5).log()
        >>> masked_nll(coin, torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[True, True, False]]), mask=2)
        tensor([1.3863], dtype=torch.float64)
    """
    log_p = predict(x.masked_fill(hidden, mask), cond)
    return -event_sum(log_p.gather(-1, x[..., None])[..., 0].double().masked_fill(~hidden, 0))


def bound_terms(
    predict: Predictor, x: Tensor, t: Tensor, mask: int, generator: Generator, cond: Tensor | None = None,
    masking: MaskingName = "linear",
) -> Tensor:
    """(B,) float64, the integrand of the negative ELBO in nats at time t (B,) of each example, random tokens masked.

        -log p(x) <= E_t E_q(x_t | x) [-alpha'(t) / (1 - alpha(t)) sum over masked of -log p(x_i | x_t)]

    Each token is masked with probability 1 - alpha(t). The expectation is the same for every alpha, and is -log p(x)
    where the predictor is exact.

    Source: Shi et al. 2024, "Simplified and generalized masked diffusion for discrete data", equation 5.

    Example:
        >>> def coin(tokens, cond):
        ...     return torch.full((*tokens.shape, 2), 0.5).log()
        >>> x, t = torch.zeros(2, 3, dtype=torch.int64), torch.full((2,), 1.0, dtype=torch.float64)
        >>> bound_terms(coin, x, t, 2, torch.Generator())  # 3 log 2
        tensor([2.0794, 2.0794], dtype=torch.float64)
    """
    t = t.to(x.device).clamp(min=1e-9)
    alpha, rate = MASKINGS[masking](t)
    drawn = uniform(x.shape, generator, dtype=torch.float64, device=x.device)
    hidden = drawn < (1 - alpha).view(-1, *(1,) * (x.dim() - 1))
    share = (1 - alpha).clamp(min=torch.finfo(torch.float64).tiny)  # 0 near t = 0, where nothing is masked
    return -rate / share * masked_nll(predict, x, hidden, mask, cond)


@torch.no_grad()
def masked_bound(
    predict: Predictor, x: Tensor, mask: int, generator: KeyedGenerator, *, cond: Tensor | None = None,
    draws: int, replicates: int = 2, rows: int | None = None,
) -> Tensor:
    """(B, replicates) float64, independent estimates of the negative ELBO in nats, a time in each of `draws` strata.

    The ELBO does not depend on the masking. `quadratic` is used, since with the others a rare masked token near t = 0
    has so large a weight that the variance is infinite.

    Arguments:
        generator: keyed over the items of x.
        rows: most rows in one network call; by default as many as suit the device.
    """
    n, rows = len(x), rows_for(x) if rows is None else rows
    at_least(1, rows=rows)
    u = draws_in_strata((n, replicates, draws), generator, x.device)
    t = ((torch.arange(draws, device=x.device) + u) / draws).flatten(1)
    values = torch.zeros_like(t)
    every = torch.ones(t.shape, dtype=torch.bool)
    for item, column, source in packed(every, generator, rows):
        given = None if cond is None else cond[item]
        values[item, column] = bound_terms(predict, x[item], t[item, column], mask, source, given, "quadratic")
    return values.view(n, replicates, draws).mean(2)


_TIE = 1e-3  # log-probabilities closer than this count as equal


@torch.no_grad()
def unmask(
    predict: Predictor, x: Tensor, mask: int, generator: Generator, *, steps: int, cond: Tensor | None = None,
    masking: MaskingName = "linear", confident: bool = False, temperature: float = 1.0,
    callback: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """The tokens x (B, *event) with every masked one filled in, in `steps` steps from t = 1 to 0.

    From t to s a masked token is drawn with probability (alpha_s - alpha_t) / (1 - alpha_t), given those before.
    `confident` instead keeps the likeliest ones, as many on average (MaskGIT, Chang et al. 2022); these are not draws
    of the model's distribution.

    Arguments:
        temperature: values are drawn from p^(1/temperature); 0 takes the most likely ones.
        callback: called after every step with its number, from 0, and the tokens.

    Source: Shi et al. 2024, algorithm 2.

    Example:
        >>> def ones(tokens, cond):
        ...     return torch.tensor([0.0, 1.0]).log().expand(*tokens.shape, 2)
        >>> unmask(ones, torch.tensor([[2, 0, 2]]), 2, torch.Generator(), steps=2)
        tensor([[1, 0, 1]])
    """
    at_least(1, steps=steps)
    alphas = MASKINGS[masking](torch.linspace(1, 0, steps + 1, dtype=torch.float64))[0].tolist()
    count = (x == mask).flatten(1).sum(1)
    for step, (now, then) in enumerate(zip(alphas, alphas[1:], strict=False)):
        hidden, noise = x == mask, at_step(generator, step)
        log_p = predict(x, cond)
        values, chances = (uniform(x.shape, noise, device=x.device) for _ in range(2))
        drawn = draw_tokens(log_p, values, temperature)
        if confident:
            # Ties are broken at random: rounding, which depends on the batch, must not decide.
            confidence = (log_p.gather(-1, drawn[..., None])[..., 0].double() / _TIE).round() + chances
            confidence = confidence.masked_fill(~hidden, math.inf).flatten(1)
            rank = confidence.argsort(dim=1, stable=True).argsort(dim=1).view_as(x)  # 0 for the least confident
            still_masked = ((1 - then) * count).round().view(-1, *(1,) * (x.dim() - 1))
            shown = hidden & (rank >= still_masked)
        else:
            shown = hidden & (chances < (then - now) / (1 - now))
        x = torch.where(shown, drawn, x)
        if callback is not None:
            callback(step, x)
    return x


def draw_tokens(log_p: Tensor, u: Tensor, temperature: float = 1.0) -> Tensor:
    """Tokens (B, *event) of log p (B, *event, V) at the quantiles u (B, *event) of p^(1/temperature).

    Raises:
        NotFinite: for an item with a NaN, or without a possible token.
    """
    require_finite_rows(log_p.amax(-1))
    if temperature == 0:
        return log_p.argmax(-1)
    if temperature != 1:  # the difference to the likeliest, so that a small temperature does not overflow
        log_p = (log_p - log_p.amax(-1, keepdim=True)) / temperature
    within = log_p.softmax(-1).cumsum(-1)
    return (within < u[..., None] * within[..., -1:]).sum(-1)
