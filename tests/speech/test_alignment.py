"""Alignment against every path there is, and against the vectors that tell right searches from wrong ones."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from genmodels.speech.alignment import (
    IMPLEMENTATIONS,
    forward_sum,
    integer_durations,
    log_paths,
    monotonic_alignment_search,
    path_of,
    total_frames,
)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    if request.param == "numba":
        pytest.importorskip("numba", reason="numba is not installed")
    return request.param


def all_durations(n: int, t: int):
    """Every way to give t frames to n tokens, one or more each."""
    for ends in itertools.combinations(range(1, t), n - 1):
        edges = (0, *ends, t)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def score_of(grid: torch.Tensor, durations) -> float:
    return float(grid[path_of(torch.tensor([durations]), grid.shape[1])[0]].sum())


def by_brute_force(grid: torch.Tensor) -> tuple[tuple[int, ...], float]:
    """The best durations; on a tie those whose last tokens are long, the rule of staying on the way back."""
    every = [(score_of(grid, d), d[::-1], d) for d in all_durations(*grid.shape)]
    best = max(score for score, _, _ in every)
    return max((back, d) for score, back, d in every if score == best)[1], best


def grids(count: int, levels: int | None):
    """Grids of all small sizes; few levels make many ties, and sums that are exact."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(n, t) for n in range(1, 6) for t in range(n, 9)]
    for k in range(count):
        n, t = sizes[k % len(sizes)]
        if levels is None:
            yield torch.randn(n, t, generator=generator, dtype=torch.float64)
        else:
            yield torch.randint(levels, (n, t), generator=generator).double()


@pytest.mark.parametrize("levels", [None, 3])
def test_no_path_is_better(implementation, levels):
    for grid in grids(150, levels):
        found = monotonic_alignment_search(grid[None], implementation=implementation)
        durations, score = by_brute_force(grid)
        assert tuple(found.durations[0].tolist()) == durations
        assert float(found.score) == pytest.approx(score, abs=1e-9)


def tutorial(grid: torch.Tensor) -> list[int]:
    """A widespread version whose loop over tokens begins at 0 and so reads the last row as the one before it."""
    n, t = grid.shape
    best = torch.full((n, t), -1e9, dtype=grid.dtype)
    best[0, 0] = grid[0, 0]
    for j in range(1, t):
        for i in range(min(j + 1, n)):
            best[i, j] = torch.maximum(best[i - 1, j - 1], best[i, j - 1]) + grid[i, j]
    durations, i = [0] * n, n - 1
    for j in range(t - 1, -1, -1):
        durations[i] += 1
        if i and j and best[i - 1, j - 1] > best[i, j - 1]:
            i -= 1
    return durations


def test_the_comparison_finds_a_wrong_search():
    wrong = sum(score_of(grid, tutorial(grid)) < by_brute_force(grid)[1] - 1e-9
                if 0 not in tutorial(grid) else True for grid in grids(300, None))
    assert wrong > 10


def test_vectors(implementation):
    def search(grid):
        return monotonic_alignment_search(torch.tensor([grid]), implementation=implementation)

    found = search([[1.0, 3, 1, 1], [1, 2, 2, 2], [4, 2, 1, 0]])
    assert found.path[0].int().tolist() == [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]] and float(found.score) == 6
    found = search([[2.0, 0, 0], [0, 1, 0]])
    assert found.path[0].int().tolist() == [[1, 0, 0], [0, 1, 1]] and float(found.score) == 3
    assert search([[0.0] * 5] * 3).durations.tolist() == [[1, 1, 3]]


def padded(seed: int = 0, scale: float = 1.0):
    """Five items of unequal sizes, what is padding full of NaN."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(3, 9), (5, 5), (1, 4), (4, 7), (2, 2)]
    scores = torch.full((5, 5, 9), torch.nan)
    text, frames = torch.zeros(5, 1, 5, dtype=torch.bool), torch.zeros(5, 1, 9, dtype=torch.bool)
    for k, (n, t) in enumerate(sizes):
        scores[k, :n, :t] = scale * torch.randn(n, t, generator=generator)
        text[k, :, :n], frames[k, :, :t] = True, True
    return scores, text, frames, sizes


def test_a_batch_is_each_item_alone(implementation):
    scores, text, frames, sizes = padded()
    together = monotonic_alignment_search(scores, text, frames, implementation=implementation)
    assert (together.path.sum(1) == frames[:, 0]).all()
    for k, (n, t) in enumerate(sizes):
        alone = monotonic_alignment_search(scores[k : k + 1, :n, :t], implementation=implementation)
        assert together.durations[k, :n].tolist() == alone.durations[0].tolist() and not together.durations[k, n:].any()
        assert together.path[k, :n, :t].equal(alone.path[0]) and alone.durations.min() >= 1
        assert float(together.score[k]) == pytest.approx(float(alone.score), rel=1e-6)


def test_scores_of_any_size(implementation):
    """A finite number in the place of minus infinity would win here."""
    for seed in range(20):
        scores, text, frames, sizes = padded(seed, scale=5e8)
        found = monotonic_alignment_search(scores, text, frames, implementation=implementation)
        for k, (n, t) in enumerate(sizes):
            grid = scores[k, :n, :t].double()
            _, best = by_brute_force(grid)
            assert score_of(grid, tuple(found.durations[k, :n].tolist())) == pytest.approx(best, rel=1e-6)


def test_all_implementations_agree(implementation):
    scores = torch.randn(3, 20, 90).round(decimals=1)
    found = monotonic_alignment_search(scores, implementation=implementation)
    assert found.durations.equal(monotonic_alignment_search(scores, implementation="torch").durations)
    assert found.path.equal(path_of(found.durations, 90))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s, t, f: f[1].fill_(False)[:, :4].fill_(True), "b has 5 tokens but only 4 frames"),
        (lambda s, t, f: t[2].fill_(False), "c has 0 tokens"),
        (lambda s, t, f: s[3, 2, 4].fill_(torch.nan), "d: the score of token 2 at frame 4 is nan"),
        (lambda s, t, f: s[0, 0, 1].fill_(torch.inf), "a: the score of token 0 at frame 1 is inf"),
        (lambda s, t, f: t[0, 0, 0].fill_(False), "one run from the front"),
    ],
)
def test_what_cannot_be_aligned_is_named(change, message):
    scores, text, frames, _ = padded()
    change(scores, text, frames)
    with pytest.raises(ValueError, match=message):
        monotonic_alignment_search(scores, text, frames, names=list("abcde"))


def test_forward_sum_adds_up_all_paths():
    for grid in grids(150, None):
        scores = torch.tensor([score_of(grid, d) for d in all_durations(*grid.shape)], dtype=torch.float64)
        found = forward_sum(grid[None])
        assert float(found) == pytest.approx(float(scores.logsumexp(0)), abs=1e-10)
        n, t = torch.tensor([grid.shape[0]]), torch.tensor([grid.shape[1]])
        assert float(log_paths(n, t)) == pytest.approx(math.log(len(scores)), abs=1e-10)
        best = float(monotonic_alignment_search(grid[None]).score)
        assert best - 1e-12 <= float(found) <= best + math.log(len(scores)) + 1e-12


def test_its_gradient_is_the_posterior():
    scores, text, frames, sizes = padded()
    scores = scores.double().requires_grad_()
    total = forward_sum(scores, text, frames)
    (gradient,) = torch.autograd.grad(total.sum(), scores)
    assert gradient.isfinite().all()
    torch.testing.assert_close(gradient.sum(1), frames[:, 0].double(), atol=1e-12, rtol=0)
    for k, (n, t) in enumerate(sizes):
        grid = scores[k, :n, :t].detach()
        paths = torch.stack([path_of(torch.tensor([d]), t)[0].double() for d in all_durations(n, t)])
        weights = (paths * grid).sum((1, 2)).softmax(0)
        torch.testing.assert_close(gradient[k, :n, :t], (weights[:, None, None] * paths).sum(0), atol=1e-12, rtol=0)
    torch.autograd.gradcheck(lambda s: forward_sum(s), torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True))


def test_the_posterior_of_a_long_mel_in_float32_is_a_probability():
    """Log-densities of 80 bands: sums near -1e5, where a step of float32 is 0.01."""
    generator = torch.Generator().manual_seed(0)
    means = 0.15 * torch.randn(80, 120, generator=generator)
    frames = means[:, torch.arange(1000) * 120 // 1000] + torch.randn(80, 1000, generator=generator)
    scores = -0.5 * (frames[:, None] - means[:, :, None]).square().sum(0)[None] - 0.9189385 * 80
    found = {}
    for dtype in (torch.float32, torch.float64):
        given = scores.to(dtype).requires_grad_()
        total = forward_sum(given)
        assert total.dtype == dtype
        found[dtype] = torch.autograd.grad(total.sum(), given)[0].double()
    torch.testing.assert_close(found[torch.float32].sum(1), torch.ones(1, 1000, dtype=torch.float64), atol=1e-5, rtol=0)
    torch.testing.assert_close(found[torch.float32], found[torch.float64], atol=1e-6, rtol=0)


def test_the_vector_of_the_sum():
    grid = torch.tensor([[[1.0, 3, 1, 1], [1, 2, 2, 2], [4, 2, 1, 0]]], dtype=torch.float64)
    assert float(forward_sum(grid)) == pytest.approx(6.407605964, abs=1e-9)
    under_prior = forward_sum(grid) - log_paths(torch.tensor([3]), torch.tensor([4]))
    assert float(under_prior) == pytest.approx(5.308993676, abs=1e-9)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_search_leaves_the_number_of_threads_alone(threads, implementation, monkeypatch):
    """numba shares OpenMP's number with torch, whose kernels round otherwise with another one."""
    if implementation == "numba":
        from genmodels.speech import alignment as alignment_numba

        own = alignment_numba.compiled()
        # What numba does in some processes: it leaves the number that its loops had.
        monkeypatch.setattr(alignment_numba, "compiled", lambda: lambda *a: (own(*a), torch.set_num_threads(3)))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        monotonic_alignment_search(torch.zeros(2, 3, 5), implementation=implementation)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


# ---- rounding of durations: the total is exact, every token has a frame, and no end is far from its place ----


VECTORS = [
    ((1.4, 2.3, 0.4, 3.2), 8, (2, 2, 1, 3)),
    ((1.4, 2.3, 0.4, 3.2), 7, (1, 3, 1, 2)),
    ((0.1, 0.1, 0.1, 0.1), 4, (1, 1, 1, 1)),
    ((5, 0.01, 0.01, 0.01), 5, (2, 1, 1, 1)),
    ((1, 3, 2, 1, 1), 8, (1, 3, 2, 1, 1)),
    ((1, 3, 2, 1, 1), 16, (2, 6, 4, 2, 2)),
    ((1, 3, 2, 1, 1), 5, (1, 1, 1, 1, 1)),
    ((2.5, 2.5, 2.5, 2.5), 10, (3, 2, 3, 2)),
    ((0, 0, 0), 10, (3, 4, 3)),
    ((1e308, 1e308), 5, (3, 2)),
    ((5e-324, 5e-324), 5, (3, 2)),
]


@pytest.mark.parametrize("widths, total, expected", VECTORS)
def test_vectors_of_durations(widths, total, expected):
    widths = torch.tensor([widths], dtype=torch.float64)
    assert integer_durations(widths, torch.tensor([total]))[0].tolist() == list(expected)


def checks(rounding) -> bool:
    """Whether totals are kept, no token is without a frame, and longer speech makes no token shorter in the sum."""
    generator = torch.Generator().manual_seed(0)
    widths = torch.rand(50, 12, generator=generator) * 4
    for total in (12, 13, 20, 57, 200):
        found = rounding(widths, torch.full((50,), total))
        if not (found.sum(1) == total).all() or found.min() < 1:
            return False
    return True


def test_totals_are_kept():
    assert checks(integer_durations)
    assert not checks(lambda widths, total: torch.ceil(total[:, None] * widths / widths.sum(1, keepdim=True)).long())


def test_ends_are_near_their_place():
    generator = torch.Generator().manual_seed(1)
    widths = 1.5 + torch.rand(50, 12, generator=generator)  # so long that nothing is clipped
    found = integer_durations(widths)
    place = widths.double().cumsum(1) * (found.sum(1) / widths.double().sum(1))[:, None]
    assert (found.cumsum(1) - place).abs().max() <= 0.5 + 1e-9


def test_speed_never_lengthens():
    widths = torch.rand(20, 9, generator=torch.Generator().manual_seed(2)) * 5
    totals = torch.stack([total_frames(widths / speed) for speed in (0.5, 1.0, 1.5, 3.0)])
    assert (totals.diff(dim=0) <= 0).all() and (totals >= 9).all()


def test_padding_has_no_frames():
    widths = torch.rand(3, 6, generator=torch.Generator().manual_seed(3)) * 4 + 0.1
    mask = torch.arange(6) < torch.tensor([6, 2, 4])[:, None]
    found = integer_durations(widths.masked_fill(~mask, torch.nan), mask=mask[:, None])
    for k, n in enumerate((6, 2, 4)):
        assert found[k, :n].tolist() == integer_durations(widths[k : k + 1, :n])[0].tolist()
        assert not found[k, n:].any()
    assert path_of(found, int(found.sum(1).max())).sum((1, 2)).equal(found.sum(1))


def test_too_few_frames_and_bad_widths():
    with pytest.raises(ValueError, match="it needs at least 3 frames"):
        integer_durations(torch.ones(1, 3), torch.tensor([2]))
    with pytest.raises(ValueError, match="finite and not negative"):
        integer_durations(torch.tensor([[1.0, -1.0]]))
