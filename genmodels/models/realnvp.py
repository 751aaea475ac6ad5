"""RealNVP (Dinh, Sohl-Dickstein, Bengio 2017) as a model: trained, evaluated and sampled like every other."""

from __future__ import annotations

from typing import Literal

from genmodels.core.data import DataSpec
from genmodels.flows.elementwise import ScaleKind
from genmodels.flows.realnvp import LAYOUT, realnvp_image, realnvp_vector
from genmodels.models.flow import FlowModel
from genmodels.nn.attention_block import AttentionKind


class RealNVP(FlowModel):
    """RealNVP: affine couplings of alternating parts, for vectors and images.

        z_1 = x_1,   z_2 = exp(h) x_2 + t,   h = a tanh(s) + b,   (s, t) = net(x_1)
        scale = plain:   z_2 = s x_2 + t,   |det| = prod |s|,   |s| >= 2^-10

    Arguments:
        spec: the data set this model is built for.
        couplings: number of couplings, for vectors.
        layout: parts for images, in order: `checkerboard*n` and `channel*n` couplings, `squeeze` and `split`.
        hidden: width of the coupling networks, one for all or (images) one for each group of couplings; null for 256
            (vectors) or 64 (images).
        depth: hidden layers (vectors) or residual blocks (images) of the networks; null for 2 or 8.
        net: kind of coupling network, for images.
        scale: form of the couplings' scale; `tied` is h = e^f tanh(s e^-f), `plain` a scale s of either sign.
        actnorm: whether activation normalisation follows every coupling, for images.
        dropout: probability of dropping a hidden value; not for gated networks.
        attention: attention block in the coupling networks for images, `none` for none.
        heads: heads of that block.
        **shared: what all flows take, see `FlowModel`.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.

    Example:
        >>> model = RealNVP(DataSpec("points", (2,)), hidden=16, ema_decay=0)
        >>> model.family
        'realnvp'
    """

    family = "realnvp"

    def __init__(
        self,
        spec: DataSpec,
        *,
        couplings: int = 8,
        layout: list[str] | tuple[str, ...] = LAYOUT,
        hidden: int | list[int] | None = None,
        depth: int | None = None,
        net: Literal["residual", "gated"] = "residual",
        scale: ScaleKind = "tanh",
        actnorm: bool = True,
        dropout: float = 0.0,
        attention: AttentionKind = "none",
        heads: int = 4,
        **shared,
    ):
        super().__init__(spec, **shared)
        shape = spec.event_shape
        common = {"dropout": dropout, "cond": self.condition, "memory": self.memory}
        usual_hidden, usual_depth = (256, 2) if len(shape) == 1 else (64, 8)
        hidden, depth = usual_hidden if hidden is None else hidden, usual_depth if depth is None else depth
        self.decide(hidden=hidden, depth=depth)
        if len(shape) == 1:
            if isinstance(hidden, list):
                raise ValueError("hidden: vectors have one width for all networks, lists are for images")
            flow = realnvp_vector(shape[0], couplings=couplings, hidden=hidden, depth=depth, scale=scale, **common)
        elif len(shape) == 3:
            flow = realnvp_image(shape, layout=layout, hidden=hidden, depth=depth, net=net, scale=scale,
                                 actnorm=actnorm, attention=attention, heads=heads, **common)
        else:
            raise ValueError(f"realnvp takes vectors and images, not events of shape {shape}: use model=glow")
        self.assemble(flow)
