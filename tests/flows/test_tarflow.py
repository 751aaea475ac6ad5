"""Meta-blocks against plain loops: triangular Jacobian, cached and fixed-point inverses, guidance, probability."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.flows.bases import StandardNormal
from genmodels.flows.bijection import Bijection
from genmodels.flows.elementwise import Affine, LogisticMixture
from genmodels.flows.flow import Flow
from genmodels.flows.linear import Permute
from genmodels.flows.tarflow import Decoding, MetaBlock, decoding, tarflow
from genmodels.nn.attention import StaticCache
from genmodels.nn.condition import Condition
from tests.parameters import kept_for_the_backward_pass, scattered, shaken

DOUBLE = torch.float64
TINY = {"width": 8, "depth": 2, "heads": 2}
LABELS = Condition("labels", 3)


def block_of(shape=(2, 3, 3), size=0.4, **options):
    torch.manual_seed(0)
    return shaken(MetaBlock(shape, **{**TINY, **options}), size).eval()


def latents(shape=(2, 3, 3), batch=3):
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)


def mixed():
    return Permute([4, 0, 8, 2, 6, 1, 7, 3, 5])


def reading(block: MetaBlock) -> list[int]:
    """The numbers of the positions in the order in which a block reads them."""
    order = list(range(block.length)) if block.read is None else block.read.index.tolist()
    return order[::-1] if block.reverse else order


def inverse_by_loop(block: MetaBlock, z, cond=None, guidance=1.0):
    """x_i = z_i exp(a_i) + m_i, one position after the other, each from the whole network without any cache."""
    order = reading(block)
    x = torch.zeros_like(z).flatten(2)
    none = None if cond is None else torch.full_like(cond, block.classes.num_embeddings - 1)
    for i, place in enumerate(order):
        m = a = torch.zeros_like(x[:, :, 0])
        if i:
            seen = x[:, :, order[:i]].mT
            out = [block.net(seen, added=None if (added := block._added(c, z[0, 0].numel())) is None
                             else added[:, :i])[:, -1] for c in (cond, none)]  # fmt: skip
            m, a = (out[1] + guidance * (out[0] - out[1])).chunk(2, dim=1)
        x[:, :, place] = z.flatten(2)[:, :, place] * torch.exp(5 * torch.tanh(a / 5)) + m
    return x.reshape(z.shape)


CASES = [{}, {"reverse": True}, {"attention": "xl"}, {"attention": "shaw", "places": False}, {"attention": "t5"},
         {"cond": LABELS}, {"cond": LABELS, "reverse": True}, {"order": mixed()},
         {"order": mixed(), "reverse": True}]  # fmt: skip


def error_of_the_cache(options, guidance=1.0):
    block, z = block_of(**options), latents()
    cond = torch.tensor([0, 2, 1]) if "cond" in options else None
    expected = inverse_by_loop(block, z, cond, guidance)
    with torch.no_grad():
        block.decoding = Decoding(guidance=guidance)
        found, _ = block.inverse(z, cond)
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("options", CASES)
def test_cached_is_uncached(options):
    assert error_of_the_cache(options) < 1e-10


@pytest.mark.parametrize("guidance", [0.0, 1.5, 3.0])
def test_guidance_extrapolates_from_no_class(guidance):
    assert error_of_the_cache({"cond": LABELS}, guidance) < 1e-10


def test_mutants_of_the_cache_are_caught(monkeypatch):
    right = StaticCache.put
    with monkeypatch.context() as patch:  # nothing is remembered
        patch.setattr(StaticCache, "put", lambda self, k, v: (k, v))
        assert error_of_the_cache({"attention": "t5"}) > 1e-3
    with monkeypatch.context() as patch:  # the newest key and value are lost
        patch.setattr(StaticCache, "put", lambda self, k, v: tuple(
            torch.cat([kept[:, :, :-1], 0 * kept[:, :, -1:]], dim=2) for kept in right(self, k, v)))
        assert error_of_the_cache({}) > 1e-3


def by_the_whole_network(block: MetaBlock, z):
    """The inverse of an event without padding, position after position, each from the whole network."""
    order = reading(block) if block.length else list(range(z.shape[-1]))[:: -1 if block.reverse else 1]
    tokens = z.flatten(2).mT[:, order]
    x = tokens[:, :0]
    for i in range(len(order)):
        added = block._added(None, len(order))
        out = block.net(x, added=None if added is None else added[:, :i])[:, -1] if i else block.start[None]
        params = out.unflatten(1, (-1, block.channels))[:, :, None]
        x = torch.cat([x, block.transform.inverse(tokens[:, i : i + 1], params)[0]], dim=1)
    found = torch.empty_like(tokens)
    found[:, order] = x
    return found.mT.reshape(z.shape)


def mixture_error(directions=(False, True)) -> float:
    """The largest error of the cached inverse of mixtures, of whole events and of padded sequences."""
    errors = []
    for reverse in directions:
        block, z = block_of(transform=LogisticMixture(1, components=3), reverse=reverse), latents()
        expected = by_the_whole_network(block, z)
        errors.append((block.inverse(z)[0] - expected).abs().max())
        for tokens in (4, None):  # the fixed point is reached after as many sweeps as tokens
            block.decoding = Decoding(tokens=tokens)
            errors.append((block.inverse(z)[0] - expected).abs().max())
        block = block_of((2, None), transform=LogisticMixture(1, components=3), reverse=reverse)
        lengths, z = (7, 4, 1), latents((2, 7))
        mask = (torch.arange(7) < torch.tensor(lengths)[:, None])[:, None]
        found = block.inverse(z.masked_fill(~mask, 0), mask=mask)[0]
        for k, n in enumerate(lengths):
            alone = by_the_whole_network(block, z[k : k + 1, :, :n])
            errors.append((found[k : k + 1, :, :n] - alone).abs().max())
    return float(torch.stack(errors).max())


@torch.no_grad()
def test_cached_is_uncached_for_mixtures_and_masks(monkeypatch):
    assert mixture_error() < 1e-9
    ordered = MetaBlock._mask_in_order
    monkeypatch.setattr(MetaBlock, "_mask_in_order",
                        lambda self, mask: None if mask is None else ordered(self, mask) | True)
    assert mixture_error([True]) > 1e-3  # padding is read, where it comes first


@torch.no_grad()
@pytest.mark.parametrize("transform", ["affine", "mixture"])
def test_eight_meta_blocks_come_back_in_float32(transform):
    """After initialisation and a small step away from it; the error grows with the derivatives of the map."""
    torch.manual_seed(0)
    x = torch.randn(16, 1, 8, 8)
    flow = tarflow((1, 8, 8), blocks=8, transform=transform, **TINY).eval()
    flow.initialize(x)
    generator = torch.Generator().manual_seed(1)
    for p in flow.parameters():
        p.add_(0.02 * torch.randn(p.shape, generator=generator))
    z, logdet = flow(x)
    back, backwards = flow.inverse(z)
    assert float((back - x).abs().max()) < 1e-5 * float(x.abs().max())
    assert float((logdet + backwards).abs().max()) < 1e-3
    assert float((z.flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1) - 1).abs().max()) > 0.01  # not the identity


def test_backwards_is_forwards_on_the_event_turned_round():
    there, back = (block_of(places=False, reverse=reverse) for reverse in (False, True))
    z, x = latents(), latents().flatten(2).flip(2).view(3, 2, 3, 3)
    assert torch.allclose(back(x)[0].flatten(2).flip(2).view(z.shape), there(z)[0], atol=1e-12)
    assert not torch.allclose(back(x)[0], there(x)[0], atol=1e-3)


# ---- the Jacobian ----------------------------------------------------------------------------------------------------


def blocks_of_the_jacobian(block, x):
    """(N, C, N, C) dz/dx of one example with tokens in the order of reading, and its log-determinant as stated."""
    jacobian = torch.autograd.functional.jacobian(lambda v: block(v[None])[0][0].flatten(1).T, x)  # (N, C, *event)
    jacobian = jacobian.flatten(3).mT[reading(block)][:, :, reading(block)]  # (N, C, N, C)
    return jacobian, block(x[None])[1]


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"order": mixed()}, {"order": mixed(), "reverse": True}])
def test_the_jacobian_is_block_triangular_with_diagonal_blocks(options):
    block, x = block_of(**options), latents()[0]
    assert [block.order.view(2, 9)[1, place] for place in reading(block)] == list(range(9))
    jacobian, logdet = blocks_of_the_jacobian(block, x)
    count, channels = jacobian.shape[:2]
    own = torch.eye(channels, dtype=torch.bool)
    for i in range(count):
        assert (jacobian[i, :, i + 1 :] == 0).all() and (jacobian[i, :, i][~own] == 0).all()
        assert (jacobian[i, :, i][own] > 0).all() and (i == 0 or (jacobian[i, :, :i] != 0).any())
    diagonal = torch.stack([jacobian[i, :, i].diagonal() for i in range(count)])
    assert torch.allclose(diagonal.log().sum(), logdet[0], atol=1e-12) and (diagonal[0] == 1).all()


def test_mutant_without_the_shift_by_one_is_caught(monkeypatch):
    def unshifted(self, out, tokens, valid, continued=False):
        padded = torch.cat([out, out[:, -1:]], dim=1)
        return padded.unflatten(2, (2, self.channels)).movedim(2, 1)

    monkeypatch.setattr(MetaBlock, "_params", unshifted)
    with pytest.raises(AssertionError):
        test_the_jacobian_is_block_triangular_with_diagonal_blocks({})


def test_an_order_that_forgets_its_inverse_is_caught():
    wrong = mixed()
    wrong.inverse_index = wrong.index
    with pytest.raises(AssertionError):
        test_the_jacobian_is_block_triangular_with_diagonal_blocks({"order": wrong})


def test_orders_of_images():
    def orders(order, blocks=4):
        flow = tarflow((1, 4, 6), blocks=blocks, order=order, **TINY)
        return [reading(block) for block in flow.modules() if isinstance(block, MetaBlock)]

    rows, columns = [0, 1, 2, 3, 4, 5], [0, 3, 1, 4, 2, 5]
    assert orders("rows") == [rows, rows[::-1], rows, rows[::-1]]
    assert orders("rows_columns") == [rows, rows[::-1], columns, columns[::-1]]
    torch.manual_seed(0)
    first, back, second, _ = orders("random")
    assert sorted(first) == rows and back == first[::-1] and second != first
    flow, other = (tarflow((1, 4, 6), blocks=2, order="random", **TINY) for _ in range(2))
    other.load_state_dict(flow.state_dict())  # the orders are saved, so that a loaded flow is the same map
    x = torch.randn(2, 1, 4, 6)
    flow.initialize(x)
    other.load_state_dict(shaken(flow).eval().float().state_dict())
    assert torch.allclose(flow(x)[0], other.eval()(x)[0], rtol=1e-4, atol=1e-4)


def mass_of_two_tokens(block: Bijection) -> float:
    """The integral of the density of two tokens of one number, by the trapezoidal rule."""
    x, y = torch.linspace(-9, 9, 91, dtype=DOUBLE), torch.linspace(-30, 30, 601, dtype=DOUBLE)
    points = torch.cartesian_prod(x, y).view(-1, 1, 2)
    with torch.no_grad():
        z, logdet = zip(*(block(part) for part in points.split(100_000)), strict=True)
    log_p = torch.cat(logdet) - torch.cat(z).flatten(1).square().sum(1) / 2 - math.log(2 * math.pi)
    return float(log_p.exp().sum() * (x[1] - x[0]) * (y[1] - y[0]))


def test_the_density_of_two_tokens_integrates_to_one(monkeypatch):
    block = block_of((1, 2), size=0.3, depth=1)
    assert abs(mass_of_two_tokens(block) - 1) < 1e-6
    monkeypatch.setattr(MetaBlock, "_volume", lambda self, log_derivative, valid: -log_derivative.flatten(1).sum(1))
    assert abs(mass_of_two_tokens(block) - 1) > 1e-2


# ---- fixed-point iteration -------------------------------------------------------------------------------------------


def inverted(block, z, **how):
    with torch.no_grad(), decoding(block, Decoding(**how)):
        x, logdet = block.inverse(z)
    return x, logdet, block.sweeps


@pytest.mark.parametrize("tokens", [None, 2, 3, 4, 9])
@pytest.mark.parametrize("options", [{}, {"reverse": True, "attention": "xl"}])
def test_iteration_is_exact_after_as_many_sweeps_as_tokens(options, tokens):
    block, z = block_of(**options), latents()
    expected, logdet, sweeps = inverted(block, z)
    found, found_logdet, _ = inverted(block, z, tokens=tokens)
    assert sweeps == 8  # nine tokens, the first of which depends on nothing
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10)
    assert torch.allclose(found_logdet, logdet, rtol=1e-10, atol=1e-10)


def test_each_sweep_makes_one_more_token_exact(monkeypatch):
    block, z = block_of(), latents()
    expected, _, _ = inverted(block, z)
    guesses = []
    right = block.transform.inverse
    monkeypatch.setattr(block.transform, "inverse", lambda *given: guesses.append(right(*given)[0]) or right(*given))
    inverted(block, z, tokens=None)
    assert len(guesses) == 9
    for k, guess in enumerate(guesses, start=1):
        error = (guess - expected.flatten(2).mT[:, k - 1 :]).abs().amax((0, 2))  # solved tokens are left out
        assert error[0] < 1e-12 and (k > 5 or error[1:].max() > 1e-9)


@pytest.mark.parametrize("moved, solved", [
    ([[0, 0, 0]], 3), ([[0, 1, 0]], 1), ([[1, 0, 0]], 1), ([[0, 0, 1], [0, 0, 0]], 2), ([[0, 0, 0], [0, 1, 0]], 1),
    ([[1, 1, 1]], 1),
])  # fmt: skip
def test_tokens_are_solved_in_order_and_for_all_items(moved, solved):
    block = block_of()
    x = latents((2, 3, 1), len(moved)).flatten(2).mT
    step = torch.tensor(moved, dtype=DOUBLE)[..., None] * torch.tensor([0.0, -1.0], dtype=DOUBLE)
    for tolerance, expected in ((1e-4, solved), (1.0, 3), (0.0, 1)):
        block.decoding = Decoding(tokens=None, tolerance=tolerance)
        assert block._settled(x, x + 0.5 * step) == expected
        assert block._settled(x, x + step / 0) == 1  # a guess that overflowed, or is not a number


def test_mutants_of_the_solved_tokens_are_caught(monkeypatch):
    block, z = block_of((1, 8, 8), size=0.2), latents((1, 8, 8))
    expected, _, _ = inverted(block, z)

    def error(**how):
        return float((inverted(block, z, **how)[0] - expected).abs().max())

    assert error(tokens=None) < 1e-10 and error(tokens=4, tolerance=1e-6) < 1e-4
    monkeypatch.setattr(MetaBlock, "_settled", lambda self, guess, x: min(2, x.shape[1]))  # one too many
    assert error(tokens=None) > 1e-3 and error(tokens=4, tolerance=1e-6) > 1e-3


def test_a_tolerance_for_no_items():
    block, z = block_of(), latents()[:0]
    found, logdet, _ = inverted(block, z, tokens=None, tolerance=1e-4)
    assert found.shape == z.shape and logdet.shape == (0,)


@pytest.mark.parametrize("tokens", [1, 4, None])
def test_an_empty_sequence_comes_back(tokens):
    flow = tarflow((3, None), patch=2, blocks=2, **TINY)
    flow.initialize(torch.randn(9, 3, 8, generator=torch.Generator().manual_seed(0)))
    with decoding(flow, Decoding(tokens=tokens)):
        x, logdet = flow.inverse(torch.zeros(2, 6, 0))
    assert x.shape == (2, 3, 0) and logdet.tolist() == [0, 0]


def test_a_tolerance_stops_early_and_the_error_is_of_its_size():
    block, z = block_of((1, 8, 8), size=0.05), latents((1, 8, 8))
    expected, logdet, all_sweeps = inverted(block, z)
    found, found_logdet, sweeps = inverted(block, z, tokens=None, tolerance=1e-4)
    assert sweeps < all_sweeps / 3
    assert 0 < (found - expected).abs().max() < 1e-3 and (found_logdet - logdet).abs().max() < 1e-2


def test_the_way_of_decoding_ends_with_its_block():
    flow = tarflow((1, 4, 4), blocks=2, **TINY)
    with pytest.raises(KeyError), decoding(flow, Decoding(tokens=None)) as blocks:
        assert len(blocks) == 2 and all(block.decoding.tokens is None for block in blocks)
        raise KeyError
    assert all(block.decoding == Decoding() for block in blocks)


# ---- gradients, errors -----------------------------------------------------------------------------------------------


def test_recomputing_changes_no_gradient():
    found = []
    for memory in ("store", "inverse"):
        torch.manual_seed(0)
        flow = tarflow((1, 4, 4), blocks=3, memory=memory, **TINY).to(DOUBLE)
        flow.initialize(latents((1, 4, 4), 16))
        scattered(flow, 0.1, seed=0)
        z, logdet = flow(latents((1, 4, 4)))
        (z.square().sum() - logdet.sum()).backward()
        found.append([p.grad for p in flow.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-8, atol=1e-10) for a, b in zip(*found, strict=True))


def test_recomputing_keeps_one_event_for_each_meta_block():
    x = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def kept(memory, blocks):
        flow = tarflow((1, 8, 8), blocks=blocks, memory=memory, **TINY)
        flow.initialize(x)
        return kept_for_the_backward_pass(flow, x)

    each = {memory: (kept(memory, 6) - kept(memory, 2)) / 4 for memory in ("store", "inverse")}
    assert each["inverse"] <= 1.1 and each["store"] > 20


def guided_without_a_null_class():
    block = MetaBlock((1, 2, 2), cond=Condition("labels", 3), null_class=False, **TINY)
    with decoding(block, Decoding(guidance=2.0)):
        block.inverse(latents((1, 2, 2)), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("make, words", [
    (lambda: tarflow((2,)), "takes images .* or sequences .*: use model=maf for vectors"),
    (lambda: tarflow((1, 7, 8)), "patch=2 does not divide the sides of images of 7 x 8; these do: 1"),
    (lambda: tarflow((1, 8, 8), blocks=0), "blocks must be at least 1"),
    (lambda: tarflow((1, 8, 8), patch=8), "patch=8 makes one token"),
    (lambda: tarflow((2, 8), patch=8), "patch=8 makes one token"),
    (lambda: tarflow((2, 9), patch=2), "does not divide the length of sequences of 9; these do: 1, 3, 9"),
    (lambda: tarflow((3, 8, 8), patch=1, patches="far"), "patches=far needs patches of several pixels"),
    (lambda: tarflow((1, 8, 8), blocks=2, order="rows_columns"), "from the third meta-block on"),
    (lambda: MetaBlock((2, 3, 3), order=torch.randperm(9)), "order must be Permute"),
    (lambda: MetaBlock((0, 3, 3)), "takes events of shape"),
    (lambda: tarflow((1, None, 4)), r"takes images \(C, H, W\) or sequences"),
    (lambda: MetaBlock((1, 2, 2), cond=Condition("labels", 3), **TINY)(latents((1, 2, 2)), torch.zeros(3)),
     "cond must be labels .* of 3 classes"),
    (lambda: MetaBlock((3, 2, 2), transform=Affine(3)), "build it for 1 channel, not for 3"),
    (lambda: Flow(MetaBlock((1, 2, 2), cond=Condition("labels", 3), null_class=False, **TINY), StandardNormal((1, 2, 2))
                  ).log_prob(torch.zeros(1, 1, 2, 2), torch.tensor([3])), "label 3 in row 0"),
    (lambda: guided_without_a_null_class(), "guidance needs null_class=True"),
    (lambda: tarflow((2, 8), patch=2, patches="far"), "patches=far is for images"),
    (lambda: tarflow((2, 8), order="random"), "order=random is for images"),
    (lambda: tarflow((1, 8, 8), order="spiral"), "order"),
    (lambda: MetaBlock((1, 4, 4), order=mixed()), "order=.* permutes 9 positions, but .* have 16"),
    (lambda: MetaBlock((2, None), order=mixed()), "order=.* permutes 9 positions, but .* an open length"),
    (lambda: block_of((2, 9), order=mixed())(latents((2, 9)), mask=torch.ones(3, 1, 9, dtype=torch.bool)),
     "order of 9 positions is for events without a mask"),
    (lambda: tarflow((1, 8, 8), transform="cubic"), "transform"),
    (lambda: MetaBlock((1, 4, 4), attention="nystrom"), "'nystrom' has no causal form"),
    (lambda: MetaBlock((1, 4, 4), attention="rope2d"), "'rope2d' has no causal form: use rope, xl"),
    (lambda: Flow(MetaBlock((1, 2, 2), cond=Condition("labels", 3), **TINY), StandardNormal((1, 2, 2))).log_prob(
        torch.zeros(2, 1, 2, 2), torch.tensor([3, 4])), "label 4 in row 1, the classes of this flow are 0..2"),
    (lambda: MetaBlock((1, 4, 4), cond=Condition("map", 2)), "conditioned on labels"),
    (lambda: block_of()(latents((2, 3, 4))), r"takes events of shape \(2, 3, 3\), got \(2, 3, 4\)"),
    (lambda: Decoding(tokens=0), "tokens must be at least 1"),
    (lambda: Decoding(tokens=1.5), "tokens must be a whole number"),
    (lambda: Decoding(guidance=math.nan), "guidance must be a finite number"),
    (lambda: Decoding(tolerance=-1.0), "tolerance must be a finite number from 0"),
])  # fmt: skip
def test_errors_are_one_line(make, words, refuses):
    refuses(ValueError, words, make)
