"""TarFlow: meta-blocks of causal attention over the positions of an event, in alternating order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.core.errors import at_least, check_number, none_or_at_least, one_of
from genmodels.core.tensors import event_sum, hide
from genmodels.flows.bijection import Bijection, Shape, as_shape, fits
from genmodels.flows.composition import Compose
from genmodels.flows.elementwise import ElementTransform, LogisticMixture, MeanScale
from genmodels.flows.linear import Permute
from genmodels.flows.scaling import ActNorm
from genmodels.flows.squeeze import Squeeze1d, Squeeze2d, require_division
from genmodels.nn.attention import StaticCache
from genmodels.nn.attention_block import AttentionKind, Site
from genmodels.nn.condition import Condition, require_condition
from genmodels.nn.dit import TokenTransformer


@dataclass(frozen=True)
class Decoding:
    """Options of the inverse of a meta-block.

    Arguments:
        tokens: number of tokens that are solved together by fixed-point iteration: 1 is sequential decoding, None all
            at once (Jacobi), anything between Gauss-Seidel-Jacobi. Solved tokens make room for the next.
        tolerance: a token is solved when all before it are and a sweep has changed it by no more. Every sweep solves
            one at least, exactly, so that there are at most as many as tokens; with 0 just as many.
        guidance: scale g of classifier-free guidance, parameters = p(no class) + g (p(class) - p(no class)); 1 is
            p(class).

    Source: Song et al. 2021, "Accelerating feedforward computation via parallel nonlinear equation solving".

    Example:
        >>> Decoding(tokens=None, tolerance=1e-4).guidance
        1.0
    """

    tokens: int | None = 1
    tolerance: float = 0.0
    guidance: float = 1.0

    def __post_init__(self):
        none_or_at_least(1, tokens=self.tokens)
        check_number("tolerance", self.tolerance, 0)
        check_number("guidance", self.guidance, -1e6)


class MetaBlock(Bijection):
    """An autoregressive layer over positions: the parameters of each come from causal attention to those before it.

        z_i = f(x_i; p_i),    p_i = p_0 + net(x_1 .. x_{i-1}, class),   p_1 = p_0,    log |det| = sum log |df/dx_i|
        by default z_i = (x_i - m_i) e^-a_i,   (m, a)_1 = 0,   log |det| = -sum a
        x_i = f^-1(z_i; p_i), one position after the other with cached keys and values

    a is bounded as in `MeanScale`; a `LogisticMixture` can have several modes. Positions are in row-major order, or any
    other, or its reverse. The last layer of the network starts at zero, so training starts with p_0, the start of the
    transform, by default the identity. The network may run in half precision, the transform does not.

    Arguments:
        event_shape: (C, H, W), or (C, T) with T or None for sequences of any length.
        reverse: whether the order of the positions is reversed.
        order: the order in which positions are read, `Permute(index)` of their row-major numbers; row-major if None.
            Not for open lengths and masks. Relative attention counts in this order.
        width, depth, heads, expansion, attention, dropout: see `TokenTransformer`; the attention is causal.
        places: whether learned position embeddings are added to the tokens; not for open lengths.
        transform: the elementwise map f, `MeanScale` if None; built for a single channel it serves all.
        cond: labels, or None.
        null_class: whether the label after the last class, for no class, is taken too, as guidance needs.

    Attributes:
        decoding: options of the inverse (see `Decoding`).
        sweeps: number of evaluations of the network in the last inverse.

    Shapes: events as given, `cond (B,)` labels, `mask (B, 1, T)`.
    Errors: ValueError for events of another shape, a condition that is no label, an attention without causal form.
    Source: Zhai et al. 2024, "Normalizing flows are capable generative models", section 2.2.

    Example:
        >>> block = MetaBlock((2, 3, 3), width=8, depth=1, heads=2)
        >>> x = torch.randn(4, 2, 3, 3)
        >>> z, logdet = block(x)
        >>> torch.equal(z, x), logdet.shape
        (True, torch.Size([4]))
    """

    strict_cond = True
    inverse_cost = "D passes"

    def __init__(
        self,
        event_shape: Shape,
        *,
        reverse: bool = False,
        order: Permute | None = None,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        expansion: int = 4,
        attention: AttentionKind = "rope",
        dropout: float = 0.0,
        places: bool = True,
        transform: ElementTransform | None = None,
        cond: Condition | None = None,
        null_class: bool = True,
    ):
        super().__init__()
        self.event_shape = as_shape(event_shape)
        channels, *space = self.event_shape
        if len(space) not in (1, 2) or channels is None or (len(space) == 2 and None in space) or 0 in self.event_shape:
            raise self._misfit("(C, H, W) or (C, T)", self.event_shape)
        require_condition(cond)
        if cond is not None and cond.kind != "labels":
            raise ValueError(f"a meta-block is conditioned on labels, not on {cond}")
        self.channels, self.reverse = channels, reverse
        self.condition, self.uses_cond = cond, cond is not None
        self.length = None if None in space else torch.Size(space).numel()
        if order is not None and not isinstance(order, Permute):
            raise ValueError(f"order must be Permute(index), got {type(order).__name__}")
        if order is not None and order.channels != self.length:
            raise ValueError(f"order={order.index.tolist()} permutes {order.channels} positions, but events of shape "
                             f"{self.event_shape} have {self.length or 'an open length'}")
        self.read = order
        self.transform = MeanScale() if transform is None else transform
        if self.transform.channels not in (None, 1):
            raise ValueError(f"{type(self).__name__}: all channels of a token share the transform: build it for 1 "
                             f"channel, not for {self.transform.channels}")
        self.exact_inverse = self.transform.exact_inverse
        start = self.transform.start(channels).flatten()
        self.net = TokenTransformer(
            channels, len(start), Site(1, None, dropout, causal=True), width=width, depth=depth, heads=heads,
            expansion=expansion, attention=attention, dropout=dropout,
        )  # fmt: skip
        learned = places and self.length is not None
        self.places = nn.Parameter(0.01 * torch.randn(self.length, width)) if learned else None
        self.num_classes, self.null_class = (None, False) if cond is None else (cond.size, null_class)
        self.classes = None if cond is None else nn.Embedding(cond.size + 1, width)
        self.register_buffer("start", start, persistent=False)
        with torch.no_grad():
            self.net.leave.bias.copy_(start)
        self.decoding, self.sweeps = Decoding(), 0

    @property
    def order(self) -> Tensor | None:
        """The position in the order of each value of the flattened event; None for an open length."""
        if self.length is None:
            return None
        place = torch.arange(self.length) if self.read is None else self.read.inverse_index
        return (self.length - 1 - place if self.reverse else place).repeat(self.channels)

    def out_shape(self, shape: Shape) -> Shape:
        if not fits(self.event_shape, shape):
            raise self._misfit(self.event_shape, shape)
        return shape

    def _forward(self, x, cond, mask):
        if self.uses_cond:
            self.condition.require(cond, x)
        tokens, valid = self._tokens(x), self._mask_in_order(mask)
        added = self._added(cond, tokens.shape[1])
        out = self.net(tokens[:, :-1], mask=None if valid is None else valid[..., :-1],  # none depends on the last
                       added=None if added is None else added[:, :-1])  # fmt: skip
        z, log_derivative = self.transform(tokens, self._params(out, tokens, valid))
        return self._event(z, x), self._volume(log_derivative, valid)

    def _inverse(self, z, cond, mask):
        if self.uses_cond:
            self.condition.require(cond, z)
        latents, valid = self._tokens(z), self._mask_in_order(mask)
        guided = self.uses_cond and self.decoding.guidance != 1
        if guided and not self.null_class:
            raise ValueError(f"{type(self).__name__}: guidance needs null_class=True")
        if guided:
            cond = torch.cat([cond, torch.full_like(cond, self.classes.num_embeddings - 1)])
        count = latents.shape[1]
        if count == 0:
            self.sweeps = 0
            return z, self._volume(latents, valid)
        added, caches = self._added(cond, count), self.net.static_caches(count)
        window, start, x = self.decoding.tokens or count, 0, latents[:, :0]
        solved, log_derivatives, self.sweeps = [], [], 0
        while start < count:
            stop = min(start + window, count)
            guess = torch.cat([x, latents[:, start + x.shape[1] : stop]], dim=1)
            # The network takes the last position before the window, and all of the window but its last.
            first = max(start - 1, 0)
            before = [solved[-1][:, -1:]] if solved else []
            own_valid = None if valid is None else valid[..., first:stop]
            out = self._decode(
                torch.cat([*before, guess[:, :-1]], dim=1), guided, caches,
                None if valid is None else valid[..., : stop - 1],
                None if added is None else added[:, first : stop - 1],
            )  # fmt: skip
            params = self._params(out, guess, own_valid, start > 0)
            x, log_derivative = self.transform.inverse(latents[:, start:stop], params)
            x = hide(x.mT, None if own_valid is None else own_valid[..., -guess.shape[1] :]).mT
            done = self._settled(guess, x)
            solved.append(x[:, :done])
            log_derivatives.append(log_derivative[:, :done])
            x, start = x[:, done:], start + done
            for cache in caches:
                cache.filled = start - 1
        return self._event(torch.cat(solved, dim=1), z), self._volume(torch.cat(log_derivatives, dim=1), valid)

    def _settled(self, guess: Tensor, x: Tensor) -> int:
        """The number of solved positions: the first, whose past is known, and those after it until one has moved."""
        if not self.decoding.tolerance or x.shape[1] == 1:
            return 1
        still = ((x - guess).detach().abs() <= self.decoding.tolerance).all(2).all(0)  # False for NaN
        return max(1, [*still.tolist(), False].index(False))

    def _decode(
        self, x: Tensor, guided: bool, caches: list[StaticCache], valid: Tensor | None, added: Tensor | None
    ) -> Tensor:
        """The network's output for the tokens that follow the cached ones; guided, from class and no class at once."""
        if not x.shape[1]:
            return x.new_zeros(len(x), 0, len(self.start))
        self.sweeps += 1
        if not guided:
            return self.net.decode(x, caches, valid, added).to(x.dtype)
        valid = None if valid is None else valid.repeat(2, 1, 1)
        of_class, of_none = self.net.decode(x.repeat(2, 1, 1), caches, valid, added).to(x.dtype).chunk(2)
        return torch.lerp(of_none, of_class, self.decoding.guidance)

    def _params(self, out: Tensor, tokens: Tensor, valid: Tensor | None, continued: bool = False) -> Tensor:
        """(B, P, N, C) parameters of tokens, each from the previous output; p_0 where the position before is not valid.

        `out` and `valid` start at the first token, or with `continued` at the position before it.
        """
        out = out.to(tokens.dtype)
        if valid is not None:
            out = torch.where(valid[..., : out.shape[1]].mT, out, self.start)
        if not continued:
            out = torch.cat([self.start.expand(len(out), 1, -1), out], dim=1)
        return out.unflatten(2, (-1, self.channels)).movedim(2, 1)

    def _volume(self, log_derivative: Tensor, valid: Tensor | None) -> Tensor:
        return event_sum(log_derivative, None if valid is None else valid.mT)

    def _tokens(self, x: Tensor) -> Tensor:
        """(B, N, C) in the order of the layer."""
        return self._in_order(x.flatten(2).mT)

    def _in_order(self, tokens: Tensor) -> Tensor:
        tokens = tokens if self.read is None else tokens[:, self.read.index]
        return tokens.flip(1) if self.reverse else tokens

    def _event(self, tokens: Tensor, like: Tensor) -> Tensor:
        tokens = tokens.flip(1) if self.reverse else tokens
        tokens = tokens if self.read is None else tokens[:, self.read.inverse_index]
        return tokens.mT.reshape(like.shape)

    def _mask_in_order(self, mask: Tensor | None) -> Tensor | None:
        """The mask in the order of the layer."""
        if mask is not None and self.read is not None:
            raise ValueError(f"{type(self).__name__}: an order of {self.length} positions is for events without a mask")
        return mask.flip(-1) if mask is not None and self.reverse else mask

    def _added(self, cond: Tensor | None, count: int) -> Tensor | None:
        """The embedding of position and class, (B or 1, N, width), if any."""
        parts = []
        if self.places is not None:
            parts.append(self._in_order(self.places[None]))
        if self.classes is not None:
            parts.append(self.classes(cond)[:, None].expand(-1, count, -1))
        return sum(parts[1:], parts[0]) if parts else None


@contextmanager
def decoding(flow: nn.Module, how: Decoding) -> Iterator[list[MetaBlock]]:
    """Sets the options of the inverse of all meta-blocks of a flow within the context, and yields these.

    Example:
        >>> flow = tarflow((1, 4, 4), patch=2, blocks=2, width=8, depth=1, heads=2)
        >>> with decoding(flow, Decoding(tokens=None, tolerance=1e-3)) as blocks:
        ...     _ = flow.inverse(torch.randn(2, 4, 2, 2))
        >>> [block.sweeps for block in blocks]  # one sweep finds the initial identity
        [1, 1]
    """
    blocks = [block for block in flow.modules() if isinstance(block, MetaBlock)]
    usual = [block.decoding for block in blocks]
    for block in blocks:
        block.decoding = how
    try:
        yield blocks
    finally:
        for block, own in zip(blocks, usual, strict=True):
            block.decoding = own


def tarflow(
    event_shape: Shape,
    *,
    patch: int = 2,
    blocks: int = 6,
    width: int = 128,
    depth: int = 2,
    heads: int = 4,
    expansion: int = 4,
    attention: AttentionKind = "rope",
    places: bool = True,
    dropout: float = 0.0,
    transform: Literal["affine", "mixture"] = "affine",
    components: int = 8,
    patches: Literal["near", "far"] = "near",
    order: Literal["rows", "rows_columns", "random"] = "rows",
    cond: Condition | None = None,
    null_class: bool = True,
    memory: Literal["store", "inverse"] = "store",
) -> Compose:
    """TarFlow: patches, an `ActNorm` and meta-blocks in alternating order.

    Arguments:
        event_shape: (C, H, W) of images, (C, T) of sequences.
        patch: positions along every side of a patch; frames of a token, for sequences.
        blocks: number of meta-blocks.
        width, depth, heads, expansion, attention, places, dropout, cond, null_class: see `MetaBlock`.
        transform: the elementwise map: `affine`, or the `mixture` of logistics of Flow++, which can have several modes
            and is inverted by iteration.
        components: number of components of a mixture.
        patches: squares of neighbours (`near`), or one pixel of each of patch^2 parts of the image (`far`), which are
            more nearly independent given earlier tokens, as a meta-block assumes.
        order: how images are read: row by row; by rows, then columns, in each pair of meta-blocks in turn; in an order
            drawn for each pair. The second of a pair reads backwards what the first reads forwards.
        memory: `store`, or `inverse` to store only the input of each meta-block and recompute its activations.

    Errors: ValueError for sides that `patch` does not divide, no block, and whatever a meta-block refuses.
    Source: Zhai et al. 2024, section 2.2.

    Example:
        >>> flow = tarflow((1, 4, 4), blocks=2, width=8, depth=1, heads=2)
        >>> flow.initialize(torch.randn(9, 1, 4, 4))
        >>> flow(torch.randn(3, 1, 4, 4))[0].shape
        torch.Size([3, 4, 2, 2])
    """
    shape = as_shape(event_shape)
    if len(shape) not in (2, 3) or shape[0] is None or (len(shape) == 3 and None in shape):
        raise ValueError(f"tarflow takes images (C, H, W) or sequences (C, T), not events of shape {shape}: use "
                         "model=maf for vectors")  # fmt: skip
    at_least(1, blocks=blocks, patch=patch)
    require_division(patch, shape)
    one_of("transform", transform, ("affine", "mixture"))
    one_of("patches", patches, ("near", "far"))
    one_of("order", order, ("rows", "rows_columns", "random"))
    if patches == "far" and patch == 1:
        raise ValueError("patches=far needs patches of several pixels, got patch=1")
    if patches == "far" and len(shape) == 2:
        raise ValueError("patches=far is for images: frames of a sequence that lie apart have no common length")
    cut = Squeeze1d(patch) if len(shape) == 2 else Squeeze2d(patch, order="channel" if patches == "near" else "far")
    squeeze = [cut] if patch > 1 else []
    inside = squeeze[0].out_shape(shape) if squeeze else shape
    if torch.Size(n or 2 for n in inside[1:]).numel() == 1:
        raise ValueError(f"patch={patch} makes one token of {shape}, and the first token depends on no other: give a "
                         "smaller patch")
    inside = (inside[0], None) if len(shape) == 2 else inside  # sequences may be shorter than the longest
    if len(shape) == 2 and order != "rows":
        raise ValueError(f"order={order} is for images: a sequence is read forwards and backwards")
    if order == "rows_columns" and blocks < 3:
        raise ValueError(f"order=rows_columns reads columns from the third meta-block on, and there are {blocks}: give "
                         "blocks=4")
    positions = torch.arange(torch.Size(inside[1:]).numel()) if len(shape) == 3 else None
    reads: list[Permute | None] = [None]
    if order == "rows_columns":
        reads = [None, Permute(positions.view(inside[1:]).T.flatten())]
    elif order == "random":
        reads = [Permute.random(len(positions)) for _ in range(0, blocks, 2)]
    layers = [
        MetaBlock(inside, reverse=number % 2 == 1, order=reads[number // 2 % len(reads)], width=width, depth=depth,
                  heads=heads, expansion=expansion, attention=attention, places=places, dropout=dropout, cond=cond,
                  null_class=null_class,
                  transform=MeanScale() if transform == "affine" else LogisticMixture(1, components=components))
        for number in range(blocks)
    ]  # fmt: skip
    return Compose([*squeeze, ActNorm(inside[0]), *layers], shape, memory=memory)
