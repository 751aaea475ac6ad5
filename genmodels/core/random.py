"""Keyed random numbers: every number is a pure function of (seed, stream, step, index, position); dropout by item.

With a stateful generator sample k depends on all samples drawn before it, hence on the batch size, on the number of
processes and on where a killed run stopped. Here the bits come from the counter-based generator Philox4x32-10 (Salmon,
Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), in integer arithmetic of torch, which runs
on the device and gives the same bits everywhere. Masks of dropout belong to the items of the global batch, so that the
number of processes does not change them.
"""

from __future__ import annotations

import hashlib
import math
from numbers import Integral

import torch
from torch import Tensor, nn

from genmodels.core.processes import rank_world

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_SHARED = _WORD  # the index that belongs to no example: draws that a whole batch has in common


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int], rounds: int = 10):
    """Four pseudo-random 32-bit words (as int64 tensors) for each 128-bit counter.

        hi, lo = mulhi(M0, c0), mullo(M0, c0);  hi', lo' = mulhi(M1, c2), mullo(M1, c2)
        c <- (hi' ^ c1 ^ k0, lo', hi ^ c3 ^ k1, lo),   k <- k + Weyl

    Example:
        >>> zero = torch.zeros((), dtype=torch.int64)
        >>> [f"{int(w):08x}" for w in philox((zero, zero, zero, zero), (0, 0))]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # An int64 product of two 32-bit words wraps, but keeps every bit: shift and mask recover both halves.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _WORD) ^ c1 ^ k0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ c3 ^ k1,
            p0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def seed_of(*parts) -> int:
    """A 63-bit seed from any plain values; the same on every machine and in every process.

    Example:
        >>> seed_of(0, "train", 3) == seed_of(0, "train", 3) != seed_of(0, "train", 4)
        True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def reseed(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of a device.

    As `torch.manual_seed`, which takes milliseconds because it records the call stack for devices that are absent.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


class KeyedGenerator:
    """Noise for a batch in which row b depends on (seed, stream, step, index[b]) and never on the other rows.

    Arguments:
        seed: the user's seed.
        index: (B,) int64, the number of each row's example (of a sample, of an item in its data set, or in the global
            batch), in 0 .. 2^32 - 2.
        stream: a name that keeps unrelated uses apart ("train", "sample", "evaluate", ...).
        step: the number of the step, or (B,) int64 with one for each row.

    Successive draws from one object differ; a fresh object with the same arguments repeats them.

    Example:
        >>> whole = KeyedGenerator(0, torch.arange(4), "sample").normal((4, 2))
        >>> alone = KeyedGenerator(0, torch.tensor([2]), "sample").normal((1, 2))
        >>> bool((whole[2] == alone[0]).all())
        True
    """

    def __init__(self, seed: int, index: Tensor, stream: str = "", step: int | Tensor = 0):
        if not isinstance(index, Tensor) or index.dim() != 1 or index.is_floating_point():
            raise ValueError(f"index must be a 1-D integer tensor, got {index!r}")
        if not isinstance(seed, Integral):
            raise ValueError(f"seed must be a whole number, got {seed!r}")
        if isinstance(step, Tensor):
            if step.shape != index.shape:
                raise ValueError(f"one step for each of {len(index)} rows is needed, got shape {tuple(step.shape)}")
        elif not 0 <= step <= _WORD:
            raise ValueError(f"step must lie in 0 .. 2^32 - 1, got {step}")
        self.seed, self.stream, self.step = int(seed), stream, step
        self.index = index.to(torch.int64)
        mixed = seed_of(self.seed, stream)
        self._key = (mixed & _WORD, (mixed >> 32) & _WORD)
        self._draw = 0

    def at(self, step: int | Tensor) -> KeyedGenerator:
        """The generator of another step (or of one step for each row), from its first draw."""
        return type(self)(self.seed, self.index, self.stream, step)

    def rows(self, selection) -> KeyedGenerator:
        """The generator of the selected rows, from its first draw."""
        step = self.step[selection] if isinstance(self.step, Tensor) else self.step
        return type(self)(self.seed, self.index[selection], self.stream, step)

    def child(self, name: str) -> KeyedGenerator:
        """A generator for another purpose with the same seed, indices and step."""
        return type(self)(self.seed, self.index, f"{self.stream}/{name}", self.step)

    def _words(self, index: Tensor, count: int, device) -> Tensor:
        """(len(index), at least count) words in 0 .. 2^32 - 1; counts as one draw."""
        blocks = torch.arange(-(-count // 4), device=device)[None, :]
        index = index.to(device)[:, None]
        own = isinstance(self.step, Tensor)
        step = self.step.to(device)[:, None] if own else torch.full_like(blocks, self.step)
        draw = torch.full_like(blocks, self._draw)
        self._draw += 1
        # The four words are concatenated, not interleaved: one `cat` of contiguous pieces.
        words = philox(torch.broadcast_tensors(blocks, index, step, draw), self._key)
        return torch.cat(words, dim=1)

    def uniform(self, shape, *, dtype=torch.float32, device=None) -> Tensor:
        """(B, *event) draws in (0, 1): (word + 1/2) / 2^32 in float64, (floor(word / 2^9) + 1/2) / 2^23 in float32."""
        count = math.prod(shape[1:])
        self._check(shape)
        words = self._words(self.index, count, device or self.index.device)[:, :count]
        return _unit(words, dtype).reshape(shape)

    def normal(self, shape, *, dtype=torch.float32, device=None) -> Tensor:
        """(B, *event) standard normal draws by Box and Muller: sqrt(-2 log u) (cos, sin)(2 pi v)."""
        count = math.prod(shape[1:])
        self._check(shape)
        words = self._words(self.index, 2 * (-(-count // 2)), device or self.index.device)
        half = words.shape[1] // 2
        # All 32 bits, so that the tail reaches 6.7 sigma; rounding up to 1 in float32 is harmless in log and cos.
        unit = (words.to(torch.promote_types(dtype, torch.float32)) + 0.5) * 2.0**-32
        radius = (-2 * torch.log(unit[:, :half])).sqrt()
        angle = (2 * math.pi) * unit[:, half:]
        z = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :count]
        return z.to(dtype).reshape(shape)

    def shared_uniform(self, count: int = 1, *, dtype=torch.float64, device=None) -> Tensor:
        """(count,) uniform draws that do not depend on the indices: the same for every process of a step."""
        if isinstance(self.step, Tensor):
            raise ValueError("a generator with one step for each row has no draws that the rows share")
        index = torch.full((1,), _SHARED, dtype=torch.int64, device=device or self.index.device)
        return _unit(self._words(index, count, index.device)[0, :count], dtype)

    def _check(self, shape) -> None:
        if len(shape) == 0 or shape[0] != len(self.index):
            raise ValueError(f"shape {tuple(shape)} does not have the {len(self.index)} rows of this generator")


class FrameKeyedGenerator(KeyedGenerator):
    """Noise for sequences (B, C, T) in which frame j of row b depends on (seed, stream, step, index[b], j) alone.

    Thus the noise of a sequence does not depend on the length that it is padded to. Other shapes are drawn as by
    `KeyedGenerator`; with a step for each row, rows have the noise of a generator of that step.

    Example:
        >>> long = FrameKeyedGenerator(0, torch.arange(2), "sample").normal((2, 3, 9))
        >>> short = FrameKeyedGenerator(0, torch.arange(2), "sample").normal((2, 3, 4))
        >>> bool((long[:, :, :4] == short).all())
        True
    """

    def uniform(self, shape, *, dtype=torch.float32, device=None) -> Tensor:
        """As `KeyedGenerator.uniform`, frame by frame."""
        if len(shape) != 3:
            return super().uniform(shape, dtype=dtype, device=device)
        return self._by_frame(shape, lambda one, flat: one.uniform(flat, dtype=dtype, device=device))

    def normal(self, shape, *, dtype=torch.float32, device=None) -> Tensor:
        """As `KeyedGenerator.normal`, frame by frame."""
        if len(shape) != 3:
            return super().normal(shape, dtype=dtype, device=device)
        return self._by_frame(shape, lambda one, flat: one.normal(flat, dtype=dtype, device=device))

    def _by_frame(self, shape, draw) -> Tensor:
        self._check(shape)
        if isinstance(self.step, Tensor):
            return self._by_step(shape, draw)
        rows, channels, frames = shape
        frame = torch.arange(frames, device=self.index.device).repeat(rows)
        stream = f"{self.stream}/frames/{self.step}/{self._draw}"
        self._draw += 1
        one = KeyedGenerator(self.seed, self.index.repeat_interleave(frames), stream, step=frame)
        return draw(one, (rows * frames, channels)).view(rows, frames, channels).mT.contiguous()

    def _by_step(self, shape, draw) -> Tensor:
        """Rows of one step together, because the name of a stream of frames contains its step."""
        steps, of = self.step.unique(return_inverse=True)
        parts, places = [], []
        for k, step in enumerate(steps.tolist()):
            places.append((of == k).nonzero().flatten().to(self.index.device))
            one = FrameKeyedGenerator(self.seed, self.index[places[-1]], self.stream, step)
            one._draw = self._draw
            parts.append(one._by_frame((len(places[-1]), *shape[1:]), draw))
        self._draw += 1
        return torch.cat(parts)[torch.cat(places).argsort().to(parts[0].device)]


def _unit(words: Tensor, dtype) -> Tensor:
    """Words to the open unit interval; float32 keeps 24 bits, hence the shift before the conversion."""
    if dtype == torch.float64:
        return (words.to(torch.float64) + 0.5) * 2.0**-32
    return ((words >> 9).to(torch.float32) + 0.5).mul(2.0**-23).to(dtype)


Generator = KeyedGenerator | torch.Generator


def normal(shape, generator: Generator, *, dtype=torch.float32, device=None) -> Tensor:
    """Standard normal draws of `shape` from either kind of generator."""
    if isinstance(generator, KeyedGenerator):
        return generator.normal(tuple(shape), dtype=dtype, device=device)
    z = torch.randn(tuple(shape), generator=generator, dtype=dtype, device=_drawing(generator).device)
    return z.to(device) if device is not None else z


def uniform(shape, generator: Generator, *, dtype=torch.float32, device=None) -> Tensor:
    """Uniform draws on [0, 1) of `shape` from either kind of generator."""
    if isinstance(generator, KeyedGenerator):
        return generator.uniform(tuple(shape), dtype=dtype, device=device)
    u = torch.rand(tuple(shape), generator=generator, dtype=dtype, device=_drawing(generator).device)
    return u.to(device) if device is not None else u


def _drawing(generator: torch.Generator) -> torch.Generator:
    if not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator or a KeyedGenerator, got {generator!r}")
    return generator


def shared_uniform(count: int, generator: Generator, *, dtype=torch.float64, device=None) -> Tensor:
    """(count,) uniform draws shared by all rows and, if keyed, by all processes."""
    if isinstance(generator, KeyedGenerator):
        return generator.shared_uniform(count, dtype=dtype, device=device)
    return uniform((count,), generator, dtype=dtype, device=device)


def at_step(generator: Generator, step: int | Tensor) -> Generator:
    """The generator for one step of a loop: re-keyed if it is keyed, itself if it is a torch.Generator."""
    return generator.at(step) if isinstance(generator, KeyedGenerator) else generator


def child(generator: Generator, name: str) -> Generator:
    """The generator for another purpose: a stream of its own if it is keyed, itself if it is a torch.Generator."""
    return generator.child(name) if isinstance(generator, KeyedGenerator) else generator


_STRIDES = tuple(seed_of("dropout", d) | 1 for d in range(8))  # odd numbers, one for each dimension
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of SplitMix64, as signed 64-bit integers
_PER_WORD = 4  # decisions that one 64-bit word gives, with 16 bits each


def checked(dropout: float) -> float:
    """A probability of dropping a value.

    Raises:
        ValueError: unless it lies in [0, 1).

    Example:
        >>> checked(float("nan"))
        Traceback (most recent call last):
        ...
        ValueError: dropout must lie in [0, 1), got nan
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
    return dropout


def dropout(x: Tensor, p: float) -> Tensor:
    """x with values dropped with probability p, to the next 2^-16, and the others divided by 1 - p.

        word = mix(key + row s_0 + i_1 s_1 + ... + i_n s_n)  mod 2^64,    four values along dimension 1 share a word

    The key is one draw of torch's generator. Whether a value is dropped depends on the key, on the number of its row in
    the global batch, and on its position in the row: not on the number of processes, nor on the length that a sequence
    is padded to. All processes must seed their generators alike.

    Shapes: `x (B, *event)` of at most eight dimensions; the result is like x.
    Source: the mixing function of Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> dropout(torch.ones(2, 6), 0.5)
        tensor([[2., 2., 0., 0., 0., 0.],
                [0., 2., 2., 2., 2., 2.]])
    """
    limit = min(round(checked(p) * 2**16), 2**16 - 1)
    if limit == 0 or x.numel() == 0:
        return x
    keep = _words(torch.randint(2**62, (), device=x.device), list(x.shape), *rank_world()) >= limit - 2**15
    return torch.where(keep, x * (2**16 / (2**16 - limit)), 0.0)


# A single operation for torch.compile, in whose C++ code the wrapping of integer products would be undefined.
@torch.library.custom_op("genmodels::dropout_words", mutates_args=(),
                         schema="(Tensor key, SymInt[] shape, int rank, int world) -> Tensor")
def _words(key: Tensor, shape: list[int], rank: int, world: int) -> Tensor:
    """A number of -2^15 .. 2^15 - 1 for each value, int16."""
    rows = [*shape, 1] if len(shape) == 1 else shape
    sizes = [rows[0], -(-rows[1] // _PER_WORD), *rows[2:]]
    word = key
    for d, size in enumerate(sizes):
        place = torch.arange(size, device=key.device)
        place = place * world + rank if d == 0 else place
        word = word + (place * _STRIDES[d]).view(-1, *[1] * (len(sizes) - 1 - d))
    word = (word ^ _shifted(word, 30)) * _MIX[0]
    word = (word ^ _shifted(word, 27)) * _MIX[1]
    word = word ^ _shifted(word, 31)
    found = word[..., None].view(torch.int16).movedim(-1, 2).flatten(1, 2)[:, : rows[1]]
    return found.reshape(shape).contiguous()


@_words.register_fake
def _(key: Tensor, shape: list[int], rank: int, world: int) -> Tensor:
    return key.new_empty(shape, dtype=torch.int16)


def _shifted(word: Tensor, places: int) -> Tensor:
    """A logical shift to the right; torch's keeps the sign."""
    return (word >> places) & (2 ** (64 - places) - 1)


class Dropout(nn.Dropout):
    """`dropout` as a layer, in training only; p in [0, 1), while torch also accepts NaN and 1."""

    def __init__(self, p: float = 0.5):
        super().__init__(checked(p))

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x
