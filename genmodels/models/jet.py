"""Jet (Kolesnikov et al. 2024) as a model: couplings of image patches by vision transformers."""

from __future__ import annotations

from genmodels.core.data import DataSpec
from genmodels.flows.jet import jet
from genmodels.models.flow import FlowModel
from genmodels.nn.attention_block import AttentionKind


class Jet(FlowModel):
    """A flow of affine couplings between the channels and between the positions of patches, for images.

        z_1 = x_1,   z_2 = (x_2 + t) 2 sigmoid(s),   (s, t) = transformer(x_1)

    Density and sample take one pass each.

    Arguments:
        spec: the data set this model is built for.
        patch: positions along every side of a patch.
        couplings: number of couplings of each level.
        spatial: every how many-th coupling is one of positions instead of channels; 0 for none.
        levels: number of scales; after each but the last half of the channels leave.
        width: width of the tokens.
        depth: layers of each network.
        heads: heads of each attention.
        expansion: hidden width of the perceptrons over the width of the tokens.
        attention: kind of attention, an entry of `ATTENTION`.
        **shared: what all flows take, see `FlowModel`.

    Raises:
        ValueError: for options that do not fit together or do not fit the data.

    Example:
        >>> Jet(DataSpec("digits", (1, 8, 8), levels=17), couplings=2, width=16, depth=1, heads=2).family
        'jet'
    """

    family = "jet"

    def __init__(
        self,
        spec: DataSpec,
        *,
        patch: int = 2,
        couplings: int = 16,
        spatial: int = 2,
        levels: int = 1,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        expansion: int = 4,
        attention: AttentionKind = "rope2d",
        **shared,
    ):
        super().__init__(spec, **shared)
        self.assemble(jet(
            spec.event_shape, patch=patch, couplings=couplings, spatial=spatial, levels=levels, width=width,
            depth=depth, heads=heads, expansion=expansion, attention=attention, cond=self.condition,
            memory=self.memory,
        ))  # fmt: skip
