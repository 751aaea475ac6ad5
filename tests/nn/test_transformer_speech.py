"""The encoder of a recogniser: padding does not exist, and a stream in chunks is the whole, exactly."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.errors import InputError
from genmodels.models.build import construct
from genmodels.nn import ATTENTION, transformer
from genmodels.nn.transformer import SpeechEncoder
from tests.parameters import scattered

LENGTHS = (150, 37, 1)
OF_SEQUENCES = [name for name, kind in ATTENTION.items() if kind.make is None or 1 in kind.dims]


def encoder(**options) -> SpeechEncoder:
    torch.manual_seed(0)
    net = SpeechEncoder(5, **{"channels": 8, "depth": 2, "heads": 2, "hidden": 12, "convolution": 5, **options})
    return scattered(net).double().eval()


def padded():
    x = torch.randn(3, 5, 150, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, (torch.arange(150) < torch.tensor(LENGTHS)[:, None])[:, None]


@torch.no_grad()
def padding_error(net: SpeechEncoder) -> float:
    """The largest difference of an item in a batch, its padding full of rubbish, from the same alone."""
    x, mask = padded()
    h, inside = net(x.masked_fill(~mask, 1e4), mask)
    assert inside.sum(2)[:, 0].tolist() == net.frames(torch.tensor(LENGTHS)).tolist()
    return max(float((net(x[k : k + 1, :, :n])[0][0] - h[k, :, : int(inside[k].sum())]).abs().max())
               for k, n in enumerate(LENGTHS)) + float(h.masked_fill(inside, 0).abs().max())


@pytest.mark.parametrize("options", [{}, {"subsampling": 4}, {"convolution": 0}, {"attention": "xl_chunks"}], ids=str)
def test_padding_does_not_exist(options):
    assert padding_error(encoder(**options)) < 1e-12


@pytest.mark.parametrize("attention", OF_SEQUENCES)
def test_every_attention_encodes(attention):
    net = encoder(attention=attention, convolution=0, depth=1)
    x = padded()[0][:, :, :40].requires_grad_()
    h, _ = net(x)
    assert h.shape == (3, 8, 20) and bool(h.isfinite().all())
    h.square().sum().backward()
    assert bool((x.grad.abs().sum((0, 1)) > 0).all())


def test_a_convolution_that_sees_padding_is_noticed(monkeypatch):
    monkeypatch.setattr(transformer, "hide", lambda x, mask: x)
    assert padding_error(encoder()) > 1e-3


@torch.no_grad()
def stream_error(net: SpeechEncoder, chunks=(1, 3, 1)) -> float:
    """The largest difference of what comes in so many chunks at a time from the whole."""
    x = padded()[0]
    whole, parts, state, done = net(x)[0], [], None, 0
    while done < x.shape[2]:
        size = net.chunk * chunks[len(parts) // 2 % len(chunks)]
        h, state = net.extend(x[:, :, done : done + size], state)
        nothing, state = net.extend(x[:, :, :0], state)
        parts += [h, nothing]
        done += size
    return float((torch.cat(parts, 2) - whole).abs().max())


@pytest.mark.parametrize("options", [{}, {"subsampling": 4}, {"convolution": 0}], ids=str)
def test_a_stream_in_chunks_is_the_whole(options):
    assert stream_error(encoder(attention="xl_chunks", **options)) < 1e-12


def test_streams_that_forget_are_noticed(monkeypatch):
    net = encoder(attention="xl_chunks")
    kept = {name: getattr(transformer, name).extend for name in ("Subsampling", "ConvolutionModule", "ConformerLayer")}
    for name, extend in kept.items():
        monkeypatch.setattr(getattr(transformer, name), "extend", lambda self, x, state, e=extend: e(self, x, None))
        assert stream_error(net) > 1e-3, name
        monkeypatch.undo()
    whole = transformer.ConvolutionModule.forward
    monkeypatch.setattr(transformer.ConvolutionModule, "forward",  # which looks a frame ahead
                        lambda self, x, mask=None: whole(self, x.roll(-1, 2), mask))
    assert stream_error(net) > 1e-3


def test_what_has_no_stream_and_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="use attention = xl_chunks"):
        encoder().extend(padded()[0])
    net = encoder(attention="music")
    _, state = net.extend(padded()[0][:, :, :3])
    with pytest.raises(ValueError, match="only the last piece of a stream .* not a multiple of 2"):
        net.extend(padded()[0][:, :, 3:5], state)
    assert encoder(attention="music").chunk == 2 and encoder(attention="xl_chunks", subsampling=4).chunk == 64
    for options, said in (({"subsampling": 3}, "2 or 4"), ({"convolution": 4}, "must be odd"),
                          ({"attention": "swin2d"}, "not one of"), ({"heads": 3}, "divide")):
        with pytest.raises(InputError, match=said):
            construct(SpeechEncoder, 5, **{"channels": 8, **options})
