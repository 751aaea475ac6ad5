"""What masks of sequences must mean: positions outside them do not exist."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from genmodels.evaluation.laws import Laws, Measured, NotApplicable
from genmodels.evaluation.laws_of_maps import relative, worst
from genmodels.evaluation.subject import Subject, crop, draw, initialize, waits

LAWS = Laws()


@LAWS.add("masked content", 1e-12, "what stands outside the mask changes nothing, gets no gradient, leaves as zeros")
def masked_content(s: Subject) -> Measured:
    """Other numbers and NaN in the padding, both ways; and the gradient that reaches it."""
    mask = s.mask()
    errors: dict[str, float] = {}
    for name, inverse, own in (("forward", False, mask), ("inverse", True, s.out_mask(mask))):
        after = mask if inverse else s.out_mask(mask)
        value = s.z if inverse else s.x
        with torch.no_grad():
            result, logdet = s.run(value, inverse, mask=own)
            for content, fill in (("other numbers", _noise(s, value)), ("NaN", torch.full_like(value, math.nan))):
                changed, changed_logdet = s.run(torch.where(own, value, fill), inverse, mask=own)
                errors[f"{name}, {content}"] = max(relative(changed, result), relative(changed_logdet, logdet))
            errors[f"{name} leaves something there"] = float(result.masked_fill(after, 0).abs().max())
        x = value.clone().requires_grad_()
        result, logdet = s.run(x, inverse, mask=own)
        gradient = torch.autograd.grad((result.square().sum() + logdet.sum()), x)[0]
        errors[f"gradient of {name}"] = float(gradient.masked_fill(own, 0).abs().max())
    return worst(errors)


def _noise(s: Subject, like: Tensor) -> Tensor:
    return 100 * torch.randn(like.shape, generator=s.generator("padding"), dtype=torch.float64).to(like.device)


@LAWS.add("padding", 1e-12, "a padded sequence gives what the sequence alone gives")
@torch.no_grad()
def padding(s: Subject) -> Measured:
    """The valid values of every padded row against the same row cropped to its length, both ways."""
    return worst({f"{where}, length {length}": relative(padded, alone)
                  for where, length, (padded, _), (alone, _) in _pairs(s)})


@LAWS.add("masked log-det", 1e-10, "the log-determinant under a mask = that of the cropped sequence")
@torch.no_grad()
def masked_log_det(s: Subject) -> Measured:
    """As for padding, of the log-determinants."""
    return worst({f"{where}, length {length}": relative(padded, alone)
                  for where, length, (_, padded), (_, alone) in _pairs(s)})


def _pairs(s: Subject):
    """Direction, length, and the results of each padded row (valid values alone) and of the same row cropped."""
    mask, lengths = s.mask(), s.lengths()
    out = s.out_mask(mask)
    for name, inverse, value, own, after in (("forward", False, s.x, mask, out), ("inverse", True, s.z, out, mask)):
        result, logdet = s.run(value, inverse, mask=own)
        for row, length in enumerate(lengths):
            cond = _cropped_cond(s, row, length)
            if inverse and value.dim() == 2:  # flattened scales: only those of the cropped sequence
                alone = value[row : row + 1][own[row : row + 1]][None]
            else:
                alone = value[row : row + 1, :, : int(own[row].sum(-1).max())]
            cropped, cropped_logdet = s.run(alone, inverse, cond=cond)
            valid = result[row][after[row].expand_as(result[row])]
            yield name, length, (valid, logdet[row]), (cropped.flatten(), cropped_logdet[0])


def _cropped_cond(s: Subject, row: int, length: int) -> Tensor | None:
    """The condition of a row; a map loses the same positions."""
    return None if s.cond is None else crop(s.cond[row : row + 1], [s.shape[-1]], [length])


@LAWS.add("masked start", 1e-6, "initialised on padded sequences = initialised on the same sequences cropped")
def masked_start(s: Subject) -> Measured:
    """Two instances initialised on 16 rows, one padded and one cropped; their state dicts are compared."""
    if not waits(s.blank):
        raise NotApplicable("needs no data to start from")
    length = s.lengths()[-1]
    rows = 16
    x = draw((rows, *s.shape), s.x_range, s.generator("start")).to(s.x.device)
    cond = None if s.cond is None else s.cond[:1].expand(rows, *s.cond.shape[1:])
    mask = (torch.arange(s.shape[-1], device=x.device) < length).expand(rows, 1, -1)
    padded, cropped = copy.deepcopy(s.blank).double().eval(), copy.deepcopy(s.blank).double().eval()
    initialize(padded, x, cond, mask)
    initialize(cropped, x[..., :length], crop(cond, [s.shape[-1]], [length]))
    return worst({
        name: relative(value.double(), other.double())
        for (name, value), other in zip(padded.state_dict().items(), cropped.state_dict().values(), strict=True)
    })
