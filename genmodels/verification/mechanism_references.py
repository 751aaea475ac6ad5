"""Reference implementations of the other attention mechanisms as plain loops over examples, heads and positions.

Only the parameters are shared with the modules. Loops run over the valid positions of each example; outputs at invalid
queries are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from genmodels.nn.attention import (
    LSH,
    Additive,
    HardAttention,
    LocalDenseSynthesizer,
    LocalMonotonic,
    Location,
    Nystrom,
    ScaledDot,
    Score,
    ScoredAttention,
)
from genmodels.verification.attention_reference import valid_key

Pairs = Callable[[int, int, int, int], bool]


def _part(module: nn.Module, h: int) -> slice:
    return slice(h * module.head_dim, (h + 1) * module.head_dim)


def _head(row: Tensor, heads: int, h: int) -> Tensor:
    return row.reshape(heads, -1)[h]


def _dot(score: ScaledDot, h: int, s: Tensor, m: Tensor, location) -> Tensor:
    q, k = _head(score.project_q(s), score.heads, h), _head(score.project_k(m), score.heads, h)
    return sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q))


def _additive(score: Additive, h: int, s: Tensor, m: Tensor, location) -> Tensor:
    hidden = _head(score.project_q(s), score.heads, h) + _head(score.project_k(m), score.heads, h)
    if location is not None:
        hidden = hidden + location @ score.project_location[h]
    return score.w[h] @ torch.tanh(hidden)


#: The equation of one pair for each score function.
SCORES: dict[type[Score], Callable] = {ScaledDot: _dot, Additive: _additive, Location: _additive}


def _filtered(score: Location, previous: Tensor, cumulative: Tensor, j: int) -> Tensor:
    """f at key j: the filters over the weights around it."""
    kernel = score.filters.weight  # (channels, 2, length)
    found = 0
    for t in range(kernel.shape[-1]):
        at = j + t - kernel.shape[-1] // 2
        if 0 <= at < len(previous):
            found = found + kernel[:, 0, t] * previous[at]
            if score.cumulative:
                found = found + kernel[:, 1, t] * cumulative[at]
    return found if isinstance(found, Tensor) else torch.zeros_like(kernel[:, 0, 0])


def scored(module: ScoredAttention, x: Tensor, source: Tensor, b: int, queries: list[int], may: Pairs) -> dict:
    """Outputs by valid query, without the surrogate gradients of `HardAttention`."""
    equation, heads, Lk = SCORES[type(module.score)], module.heads, source.shape[1]
    looked = {h: (torch.zeros(Lk, dtype=x.dtype), torch.zeros(Lk, dtype=x.dtype)) for h in range(heads)}
    outputs = {}
    for i in queries:
        row = []
        for h in range(heads):
            keys = [j for j in range(Lk) if may(b, h, i, j)]
            location = {j: None for j in keys}
            if module.score.uses_past:
                location = {j: _filtered(module.score, *looked[h], j) for j in keys}
            e = [equation(module.score, h, x[b, i], source[b, j], location[j]) for j in keys]
            a = torch.stack(e).softmax(0) if e else []
            if isinstance(module, HardAttention) and e:
                values = [float(score.detach()) for score in e]
                a = [float(n == values.index(max(values))) for n in range(len(e))]
            weights = torch.zeros(Lk, dtype=x.dtype)
            total = torch.zeros(module.head_dim, dtype=x.dtype)
            for n, j in enumerate(keys):
                weights = weights + a[n] * torch.eye(Lk, dtype=x.dtype)[j]
                total = total + a[n] * module.project_v(source[b, j])[_part(module, h)]
            looked[h] = (weights, looked[h][1] + weights)
            row.append(total)
        outputs[i] = module.project_out(torch.cat(row))
    return outputs


def local_dense(
    module: LocalDenseSynthesizer, x: Tensor, source: Tensor, b: int, queries: list[int], may: Pairs
) -> dict:
    """Outputs by valid query: each attends to the c positions around it, with weights from its own input alone.

        h_t = relu(W_1 x_t),   a_t = softmax(W_2 h_t),   y_t = sum_j a_tj v_{t + j - c//2}
    """
    outputs = {}
    for t in queries:
        row = []
        for h in range(module.heads):
            hidden = torch.relu(module.project_hidden.weight[_part(module, h)] @ x[b, t])
            logits = module.W2[h].T @ hidden
            places = [(j, t + j - module.c // 2) for j in range(module.c)]
            there = [(j, at) for j, at in places if 0 <= at < x.shape[1] and may(b, h, t, at)]
            share = [j for j, _ in (there if module.boundary == "renormalise" else places)]
            a = logits[share].softmax(0)
            row.append(sum(a[share.index(j)] * module.project_v(x[b, at])[_part(module, h)] for j, at in there))
        outputs[t] = module.project_out(torch.cat(row))
    return outputs


def local_monotonic(module: LocalMonotonic, x: Tensor, source: Tensor, b: int, queries: list[int], may: Pairs) -> dict:
    """Outputs by query, in order: a position that moves forward, and a Gaussian window of width sigma around it.

        p_t = min(p_{t-1} + step_t, last)
        y_t = sum_s height_t exp(-(s - p_t)^2 / 2 sigma^2) e_ts v_s,   |s - p_t| <= 2 sigma
    """
    p = [torch.zeros((), dtype=x.dtype) for _ in range(module.heads)]
    valid = [j for j in range(source.shape[1]) if may(b, 0, 0, j)]
    outputs = {}
    for t in queries:
        row = []
        for h in range(module.heads):
            z = module.V_p[h] @ torch.tanh(_head(module.project_step(x[b, t]), module.heads, h))
            step = torch.exp(z) if module.max_step is None else module.max_step / (1 + torch.exp(-z))
            p[h] = torch.clamp(p[h] + step, max=max(valid, default=0))
            height = torch.exp(module.V_l[h] @ torch.tanh(_head(module.project_height(x[b, t]), module.heads, h)))
            near = [s for s in valid if abs(s - float(p[h].detach())) <= 2 * module.sigma]
            e = [_additive(module.additive, h, x[b, t], source[b, s], None) for s in near]
            if module.score == "softmax" and e:
                e = torch.stack(e).softmax(0)
            total = torch.zeros(module.head_dim, dtype=x.dtype)
            for s, score in zip(near, e, strict=True):
                bell = height * torch.exp(-((s - p[h]) ** 2) / (2 * module.sigma**2))
                total = total + bell * score * module.project_v(source[b, s])[_part(module, h)]
            row.append(total)
        outputs[t] = module.project_out(torch.cat(row))
    return outputs


def nystrom(module: Nystrom, x: Tensor, source: Tensor, b: int, queries: list[int], may: Pairs) -> dict:
    """Outputs by valid query, from the valid positions alone; landmarks are means of slices."""
    keys = [j for j in range(source.shape[1]) if may(b, 0, 0, j)]
    if not keys or not queries:
        return {i: module.project_out(torch.zeros(module.dim, dtype=x.dtype)) for i in queries}
    row = []
    for h in range(module.heads):
        q, k, v = (projection(rows)[:, _part(module, h)] for projection, rows in
                   ((module.project_q, x[b, queries]), (module.project_k, source[b, keys]),
                    (module.project_v, source[b, keys])))  # fmt: skip
        qL, kL = _slices(q, module.landmarks), _slices(k, module.landmarks)
        root = math.sqrt(module.head_dim)
        A = (qL @ kL.T / root).softmax(-1)
        if module.iterations is None:
            Z = torch.linalg.pinv(A)
        else:
            Z = A.T / (A.abs().sum(0).max() * A.abs().sum(1).max())
            eye = torch.eye(len(A), dtype=A.dtype)
            for _ in range(module.iterations):
                Z = Z @ (13 * eye - A @ Z @ (15 * eye - A @ Z @ (7 * eye - A @ Z))) / 4
        row.append((q @ kL.T / root).softmax(-1) @ Z @ (qL @ k.T / root).softmax(-1) @ v)
    y = module.project_out(torch.cat(row, dim=-1))
    return dict(zip(queries, y, strict=True))


def _slices(rows: Tensor, count: int) -> Tensor:
    """Means of `count` slices, from ceil(s n / count) on; slices of nothing are dropped."""
    n = len(rows)
    edges = [-(-s * n // count) for s in range(count + 1)]
    return torch.stack([rows[a:z].mean(0) for a, z in zip(edges, edges[1:], strict=False) if z > a])


def lsh(module: LSH, x: Tensor, source: Tensor, b: int, queries: list[int], may: Pairs) -> dict:
    """Outputs by valid query: its keys are those in the same bucket, in its own chunk or the one before.

    A key found in several rounds counts as often; a query without keys keeps its own value.
    """
    outputs = {i: [] for i in queries}
    for h in range(module.heads):
        qk = {i: module.project_qk(x[b, i])[_part(module, h)] for i in queries}
        v = {i: module.project_v(x[b, i])[_part(module, h)] for i in queries}
        found = {i: [] for i in queries}
        for r in range(module.rounds):
            bucket = {i: _bucket(module, qk[i].detach(), module.directions[h, r]) for i in queries}
            line = sorted(queries, key=lambda i: (bucket[i], i))
            place = {i: n // min(module.chunk, x.shape[1]) for n, i in enumerate(line)}
            for i in queries:
                found[i] += [j for j in queries if j != i and bucket[i] == bucket[j] and place[i] - place[j] in (0, 1)]
        for i in queries:
            if not found[i]:
                outputs[i].append(v[i])
                continue
            k = [qk[j] / qk[j].norm() for j in found[i]]
            a = torch.stack([qk[i] @ row / math.sqrt(module.head_dim) for row in k]).softmax(0)
            outputs[i].append(sum(a[n] * v[j] for n, j in enumerate(found[i])))
    return {i: module.project_out(torch.cat(rows)) for i, rows in outputs.items()}


def _bucket(module: LSH, x: Tensor, directions: Tensor) -> int:
    if module.buckets == 1:
        return 0
    along = [float(x @ directions[:, k].to(x.dtype)) for k in range(directions.shape[1])]
    if module.hash == "sign":
        return int("".join("1" if value > 0 else "0" for value in along), 2)
    both = along + [-value for value in along]
    return both.index(max(both))


#: The loop of each mechanism; add one to check another mechanism.
MECHANISM_REFERENCES: dict[type[nn.Module], Callable] = {
    ScoredAttention: scored,
    HardAttention: scored,
    LocalDenseSynthesizer: local_dense,
    LocalMonotonic: local_monotonic,
    Nystrom: nystrom,
    LSH: lsh,
}


def reference_mechanism(
    module: nn.Module, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None,
    memory_mask: Tensor | None = None,
) -> Tensor:
    """The value of `module(x, ...)` in evaluation, `(B, Lq, D)`; differentiable.

    Example:
        >>> module, x = ScoredAttention(4, 2), torch.randn(1, 3, 4)
        >>> bool((reference_mechanism(module, x) - module(x)[0]).abs().max() < 1e-5)
        True
    """
    loop = next(MECHANISM_REFERENCES[kind] for kind in type(module).__mro__ if kind in MECHANISM_REFERENCES)
    source, key_mask = (x, mask) if memory is None else (memory, memory_mask)

    def may(b: int, h: int, i: int, j: int) -> bool:
        return valid_key(key_mask, b, h, i, j)

    examples = []
    for b in range(len(x)):
        padded = mask is not None and mask.dim() == 3
        queries = [i for i in range(x.shape[1]) if not padded or mask[b % len(mask), 0, i]]
        rows = loop(module, x, source, b, queries, may)
        nothing = torch.zeros(x.shape[-1], dtype=x.dtype)
        examples.append(torch.stack([rows.get(i, nothing) for i in range(x.shape[1])]))
    return torch.stack(examples)
