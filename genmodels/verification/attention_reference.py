"""Reference implementation of attention as plain loops over pairs of positions.

Only the parameters are shared with `genmodels.nn.attention`. The output is differentiable, so gradients can be compared
too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from genmodels.nn.attention import (
    ALiBi,
    Attention,
    MelPosition,
    MusicTransformer,
    Position,
    Rotary,
    Rotary2d,
    Shaw,
    Swin2d,
    T5Bias,
    TransformerXL,
)

Space = tuple[int, int]


@dataclass(frozen=True)
class Rule:
    """A position scheme for one query i and one key j, absolute indices, of head h; a part not given changes nothing.

    Arguments:
        turn: `(position, vector (d,), index, space) -> (d,)`, of queries and keys alike.
        query: `(position, h) -> u (d,)`.
        score: `(position, h, q (d,), i, j, space) -> scalar`, in units of the logits.
        value: `(position, h, i, j, space) -> (d,)`.
    """

    turn: Callable = lambda position, x, index, space: x
    query: Callable = lambda position, h: 0
    score: Callable = lambda position, h, q, i, j, space: 0
    value: Callable = lambda position, h, i, j, space: 0


def encoded_distance(r: int, dim: int) -> list[float]:
    """R[r]: sines at even places, cosines at odd ones.

    Example:
        >>> [round(v, 4) for v in encoded_distance(-1, 4)]
        [-0.8415, 0.5403, -0.01, 1.0]
    """
    angles = [r * 10000 ** (-2 * (c // 2) / dim) for c in range(dim)]
    return [math.cos(angle) if c % 2 else math.sin(angle) for c, angle in enumerate(angles)]


def _xl_score(position, h, q, i, j, space):
    encoded = torch.tensor(encoded_distance(j - i, position.dim), dtype=q.dtype)
    d = position.head_dim
    key = (position.project.weight @ encoded)[h * d : (h + 1) * d]
    return (q + position.v[h]) @ key / math.sqrt(d)


def _shaw_row(position, table, h, i, j):
    r = j - i
    if abs(r) > position.K and position.outside == "zero":
        return torch.zeros_like(table[0, 0])
    return table[h if len(table) > 1 else 0, min(max(r, -position.K), position.K) + position.K]


def _shaw_score(position, h, q, i, j, space):
    return q @ _shaw_row(position, position.keys, h, i, j) / math.sqrt(position.head_dim)


def _shaw_value(position, h, i, j, space):
    return 0 if position.values is None else _shaw_row(position, position.values, h, i, j)


def _music_score(position, h, q, i, j, space):
    back = min(max(i - j, 0), position.max_len - 1)
    return q @ position.E[h if len(position.E) > 1 else 0, position.max_len - 1 - back] / math.sqrt(position.head_dim)


def t5_bucket(r: int, buckets: int, max_distance: int, bidirectional: bool) -> int:
    """The published formula, with a logarithm.

    Example:
        >>> [t5_bucket(r, 32, 128, True) for r in (-128, -8, 0, 1, 8)]
        [15, 8, 0, 17, 24]
    """
    start, n = 0, abs(r)
    if bidirectional:
        buckets //= 2
        start = buckets if r > 0 else 0
    elif r > 0:
        n = 0
    exact = buckets // 2
    if n < exact:
        return start + n
    far = math.floor(math.log(n / exact) / math.log(max_distance / exact) * (buckets - exact) + 1e-12)
    return start + min(exact + far, buckets - 1)


def _t5_score(position, h, q, i, j, space):
    buckets, max_distance = len(position.weight), position.max_distance
    return position.weight[t5_bucket(j - i, buckets, max_distance, position.bidirectional), h]


def _alibi_score(position, h, q, i, j, space):
    power = 2 ** math.floor(math.log2(position.heads))
    slopes = [2 ** (-8 * n / power) for n in range(1, power + 1)]
    slopes += [2 ** (-8 * n / (2 * power)) for n in range(1, 2 * power + 1, 2)]
    distance = abs(j - i) if position.symmetric else max(i - j, 0)
    return -slopes[h] * distance


def _turned(x: Tensor, index: int, base: float, layout: str) -> Tensor:
    d, y = len(x), [None] * len(x)
    for m in range(d // 2):
        a, b = (2 * m, 2 * m + 1) if layout == "interleaved" else (m, m + d // 2)
        angle = index * base ** (-2 * m / d)
        y[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        y[b] = x[a] * math.sin(angle) + x[b] * math.cos(angle)
    return torch.stack(y)


def _rotary_2d_turn(position, x, index, space):
    y, column = divmod(index, space[1])
    half = len(x) // 2
    parts = [(x[:half], y), (x[half:], column)]
    return torch.cat([_turned(part, at, position.base, position.layout) for part, at in parts])


def _swin_score(position, h, q, i, j, space):
    rows, columns = (2 * n - 1 for n in position.size)
    table = position.table[:, h].reshape(rows, columns)
    height, width = space
    if tuple(space) != tuple(position.size):
        # Torch aligns a single row with the first row of the table, but distance 0 is the middle one.
        table = table[rows // 2 : rows // 2 + 1] if height == 1 else table
        table = table[:, columns // 2 : columns // 2 + 1] if width == 1 else table
        size = (2 * height - 1, 2 * width - 1)
        table = interpolate(table[None, None], size, mode="bicubic", align_corners=True)[0, 0]
    (yi, xi), (yj, xj) = divmod(i, width), divmod(j, width)
    return table[yi - yj + height - 1, xi - xj + width - 1]


def _mel_turn(position, x, index, space):
    return rule_of(position.time).turn(position.time, x, index % space[1], None)


def _mel_query(position, h):
    return rule_of(position.time).query(position.time, h)


def _mel_score(position, h, q, i, j, space):
    (fi, ti), (fj, tj) = divmod(i, space[1]), divmod(j, space[1])
    return rule_of(position.time).score(position.time, h, q, ti, tj, None) + position.F[h, fi, fj]


def _mel_value(position, h, i, j, space):
    return rule_of(position.time).value(position.time, h, i % space[1], j % space[1], None)


#: The equations of each scheme; add a rule to check another one.
RULES: dict[type[Position], Rule] = {
    Position: Rule(),
    TransformerXL: Rule(query=lambda position, h: position.u[h], score=_xl_score),
    Shaw: Rule(score=_shaw_score, value=_shaw_value),
    MusicTransformer: Rule(score=_music_score),
    T5Bias: Rule(score=_t5_score),
    ALiBi: Rule(score=_alibi_score),
    Rotary: Rule(turn=lambda position, x, index, space: _turned(x, index, position.base, position.layout)),
    Rotary2d: Rule(turn=_rotary_2d_turn),
    Swin2d: Rule(score=_swin_score),
    MelPosition: Rule(turn=_mel_turn, query=_mel_query, score=_mel_score, value=_mel_value),
}


def rule_of(position: Position) -> Rule:
    """The rule of the nearest class that has one, so that a broken subclass is compared with its parent."""
    return next(RULES[kind] for kind in type(position).__mro__ if kind in RULES)


def may_attend(attention: Attention, i: int, j: int) -> bool:
    """Whether key j is in reach of query i, from the definitions of causal, window and chunk."""
    reach = attention.reach
    if reach.causal and j > i:
        return False
    if reach.window is not None:
        left, right = reach.window
        if (left is not None and i - j > left) or (right is not None and j - i > right):
            return False
    if reach.chunk is not None:
        size, left_chunks = reach.chunk
        before = i // size - j // size
        if before < 0 or (left_chunks is not None and before > left_chunks):
            return False
    return True


def reference_attention(
    attention: Attention, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None,
    memory_mask: Tensor | None = None, offset: int = 0, space: Space | None = None,
) -> tuple[Tensor, Tensor]:
    """The values of `attention(x, ...)`, y `(B, Lq, D)`, and `attention.weights(x, ...)`, a `(B, H, Lq, Lk)`.

    Loops over examples, heads, queries and keys; padded positions are never read, and are 0 in y.

    Example:
        >>> attention = Attention(4, 2, ALiBi(4, 2), causal=True)
        >>> x = torch.randn(1, 3, 4)
        >>> bool((reference_attention(attention, x)[0] - attention(x)[0]).abs().max() < 1e-5)
        True
    """
    position, rule = attention.position, rule_of(attention.position)
    source, key_mask = (x, mask) if memory is None else (memory, memory_mask)
    start, H, d = (offset if memory is None else 0), attention.heads, attention.head_dim
    batch, Lq, Lk = len(x), x.shape[1], source.shape[1]
    if position.dims == 2 and space is None:
        space = position.space_of(Lq)
    outputs, weights = [], x.new_zeros(batch, H, Lq, Lk)
    # Each is needed by every query, and computed at the first.
    whole_key = cache(lambda b, j: attention.project_k(source[b, j]))
    whole_value = cache(lambda b, j: attention.project_v(source[b, j]))

    @cache
    def key_of(b: int, h: int, j: int) -> Tensor:
        return rule.turn(position, whole_key(b, j)[h * d : (h + 1) * d], start + j, space)

    for b in range(batch):
        for i in range(Lq):
            if mask is not None and mask.dim() == 3 and not mask[b % len(mask), 0, i]:
                outputs.append(torch.zeros_like(attention.project_q.weight[0]))
                continue
            heads, query = [], attention.project_q(x[b, i])
            for h in range(H):
                part = slice(h * d, (h + 1) * d)
                q = rule.turn(position, query[part], offset + i, space)
                u, seen = rule.query(position, h), []
                for j in range(Lk):
                    if not may_attend(attention, offset + i, start + j) or not valid_key(key_mask, b, h, i, j):
                        continue
                    s = (q + u) @ key_of(b, h, j) / math.sqrt(d)
                    seen.append((j, s + rule.score(position, h, q, offset + i, start + j, space)))
                head = torch.zeros_like(q)
                total = torch.logsumexp(torch.stack([s for _, s in seen]), 0) if seen else None
                for j, s in seen:
                    a = (s - total).exp()
                    weights[b, h, i, j] = a.detach()
                    v = whole_value(b, j)[part] + rule.value(position, h, offset + i, start + j, space)
                    head = head + a * v
                heads.append(head)
            outputs.append(attention.project_out(torch.cat(heads)))
    return torch.stack(outputs).view(batch, Lq, -1), weights


def valid_key(mask: Tensor | None, b: int, h: int, i: int, j: int) -> bool:
    """Whether the mask, (B, 1, L) or broadcastable to (B, H, Lq, Lk), lets query i attend to key j."""
    if mask is None:
        return True
    if mask.dim() == 3:
        return bool(mask[b % len(mask), 0, j])
    full = mask if mask.dim() == 4 else mask[None, None]
    return bool(full[tuple(at % n for at, n in zip((b, h, i, j), full.shape, strict=True))])
