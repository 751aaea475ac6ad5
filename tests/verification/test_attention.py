"""The conformance kit of attention: mutants are caught by exactly the checks named, sound modules by none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from genmodels.nn.attention import ALiBi, Attention, MelPosition, Rotary, Rotary2d, Swin2d, TransformerXL
from genmodels.verification import attention as mechanisms
from genmodels.verification.attention import CHECKS, MECHANISMS, Survey, check
from genmodels.verification.attention_masks import CAPABILITIES
from genmodels.verification.attention_reference import RULES
from genmodels.verification.check import FAILED, NOT_APPLICABLE, PASSED, Check, CheckFailed, Report
from genmodels.verification.mechanism_references import MECHANISM_REFERENCES
from tests.mutants.attention import MUTANTS
from tests.mutants.attention_core import Explicit
from tests.mutants.attention_positions import Encoded, SharedSign
from tests.nn.attention.table import CASES, REACHES, kinds
from tests.nn.attention.table import MECHANISMS as TABLE


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails_exactly_its_checks(name):
    report = MUTANTS[name].run()
    assert set(report.failed) == MUTANTS[name].failing, str(report)


class TwoLayers(nn.Module):
    """What a query sees in the second layer has seen other keys in the first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, x, mask=None):
        pairs, ends = (mask, None) if mask is None or mask.dim() == 2 else (None, mask[:, 0])
        for layer in self.layers:
            x = layer(x, x, x, attn_mask=None if pairs is None else ~pairs,
                      key_padding_mask=None if ends is None else ~ends, need_weights=False)[0]
        return x


def test_layers_that_follow_layers_keep_masks_of_pairs():
    report = check(TwoLayers(), 8, capabilities=["unordered", "full"], compiler=None, only=["masks of pairs"])
    assert report.passed and report["masks of pairs"].status == PASSED, str(report)


def test_every_check_has_a_mutant():
    assert set().union(*(mutant.failing for mutant in MUTANTS.values())) == set(CHECKS.specs)


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_passes_every_check(name):
    MECHANISMS[name].check(name, compiler=None).raise_if_failed()


#: One of each: further options are other numbers in the same code.
COMPILED = {
    "none", "xl", "shaw clip", "shaw zero", "shaw keys", "music", "t5", "alibi", "rotary", "rotary half", "swin",
    "rotary 2d", "mel", "mel xl", "additive", "location", "scaled dot", "hard", "local dense", "local dense zero",
    "monotonic", "monotonic bounded", "nystrom", "nystrom exact", "lsh rotation", "lsh sign",
}  # fmt: skip


@pytest.mark.parametrize("case, backend", [(case, kind) for case in CASES for kind in kinds(case)],
                         ids=lambda given: getattr(given, "name", given))  # fmt: skip
def test_every_scheme_passes_every_check_by_each_path(case, backend):
    """Fused kernels have no second derivatives."""
    claimed = [*case.claims.split(), "full", *["derivatives"] * (backend == "explicit")]
    compiler = "eager" if backend == kinds(case)[0] and case.name in COMPILED else None
    module = case.plain(8, 2, backend=backend)
    check(module, 8, capabilities=claimed, space=case.space, compiler=compiler).raise_if_failed()


@pytest.mark.parametrize("case", [case for case in CASES if case.space is None], ids=lambda case: case.name)
@pytest.mark.parametrize("reach", [*REACHES[1:], {"window": (2, 0)}, {"window": (None, 0)},
                                   {"causal": True, "chunk": (3, 1)}], ids=str)  # fmt: skip
def test_every_scheme_within_a_reach(case, reach):
    module = case.plain(8, 2, **reach)
    left, right = reach.get("window", (None, None))
    within = (left, 0 if module.reach.no_future and left is not None else right)
    claimed = ["causal", "cache"] if module.reach.no_future else []
    check(module, 8, capabilities=claimed, reach=within, compiler=None,
          only=["double loop", "paths", "causality", "cache", "locality"]).raise_if_failed()


@pytest.mark.parametrize("mechanism", TABLE, ids=lambda mechanism: mechanism.name)
def test_every_variant_of_a_mechanism_passes_every_check(mechanism):
    claimed = [*mechanism.claims.split(), "derivatives", *["full"] * mechanism.pairs]
    compiler = "eager" if mechanism.name in COMPILED else None
    check(mechanism.make(None), 8, capabilities=claimed, reach=mechanism.reach, compiler=compiler).raise_if_failed()


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_compiles(name):
    MECHANISMS[name].check(name, compiler="aot_eager", only=["compiled"]).raise_if_failed()


def test_the_table_holds_every_scheme_and_every_mechanism():
    modules = [mechanism.make(8, 2) for mechanism in MECHANISMS.values()]
    assert {type(m.position) for m in modules if isinstance(m, Attention)} == set(RULES)
    assert {type(m) for m in modules if not isinstance(m, Attention)} == set(MECHANISM_REFERENCES)


# ---- capabilities ----


def test_capabilities_name_the_checks_that_are_made():
    module = Attention(8, 2, Rotary(8, 2), causal=True)
    plain = check(module, 8, compiler=None)
    assert {plain[check].status for check in ("shift", "cache", "causality", "sign")} == {NOT_APPLICABLE}
    said = check(module, 8, capabilities=["relative", "cache", "causal"], compiler=None)
    assert {said[check].status for check in ("shift", "cache", "causality", "sign")} == {PASSED}
    assert "not among its capabilities" in plain["cache"].note and plain.passed and said.passed


def test_a_capability_that_is_not_there_is_a_failed_check():
    report = check(Attention(8, 2, ALiBi(8, 2)), 8, capabilities=["relative", "causal", "cache"], compiler=None)
    assert set(report.failed) == {"sign", "causality", "cache"}
    assert "a cache holds the past" in report["cache"].note


@pytest.mark.parametrize("words, options", [
    ("no capability 'relatve': did you mean 'relative'", {"capabilities": ["relatve"]}),
    ("no check 'sing': did you mean 'sign'", {"only": ["sing"]}),
    ("capability 2d and space", {"capabilities": ["2d"]}),
    ("capability 2d and space", {"space": (2, 3)}),
])  # fmt: skip
def test_errors_are_one_line(words, options, refuses):
    refuses(ValueError, words, check, Attention(8, 2), 8, **options)


# ---- modules of one's own ----


class Positional(nn.Module):
    """Takes its mask by another name, and gives y alone."""

    def __init__(self):
        super().__init__()
        self.inner = Explicit(8, 2)

    def forward(self, x, valid=None):
        return self.inner(x, valid)


class MaskNeeded(torch.nn.Module):
    """A mean over the valid positions, called as `module(x, mask)`."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 8)

    def forward(self, x, mask):
        weights = mask.mT.to(x.dtype)
        mean = (self.project(torch.where(mask.mT, x, 0)) * weights).sum(1) / weights.sum(1).clamp(min=1)
        return mean[:, None] * weights


def test_a_mask_may_be_needed():
    check(MaskNeeded(), 8, capabilities=["derivatives"], compiler=None, without=["empty rows"]).raise_if_failed()


@pytest.mark.parametrize("position, claims", [
    (Rotary2d, "relative 2d full"), (lambda dim, heads: Swin2d(dim, heads, size=(2, 3)), "relative 2d full resampled"),
], ids=["rope2d", "swin"])  # fmt: skip
@pytest.mark.parametrize("space", [(1, 5), (5, 1), (1, 2)])
def test_maps_of_a_single_row_or_column(position, claims, space):
    module = Attention(8, 2, position(8, 2), derivatives=2)
    check(module, 8, capabilities=claims.split(), space=space, compiler=None).raise_if_failed()


@pytest.mark.parametrize("name", ["Nystrom, exact", "local monotonic", "local monotonic, softmax"])
@pytest.mark.parametrize("seed", [1, 3, 7, 11])
def test_mechanisms_pass_whatever_the_seed(name, seed):
    MECHANISMS[name].check(name, compiler=None, seed=seed).raise_if_failed()


def test_any_module_of_x_and_mask_will_do():
    report = check(Positional(), 8, capabilities=["unordered", "full"])
    assert report.passed and report["double loop"].status == NOT_APPLICABLE and report["compiled"].status == PASSED


def test_a_reference_of_ones_own():
    def by_torch(module, x, mask, space):
        q, k, v = module.inner.project_in(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, None if mask is None else mask[:, :, None])
        return module.inner.project_out(y.transpose(1, 2).flatten(2))

    assert check(Positional(), 8, reference=by_torch, only=["double loop"]).passed
    wrong = check(Positional(), 8, reference=lambda *given: 2 * by_torch(*given), only=["double loop"])
    assert wrong["double loop"].status == FAILED
    with pytest.raises(CheckFailed, match="double loop"):
        wrong.raise_if_failed()


class OfEights(Attention):
    """Takes whole blocks of eight positions, and masks of numbers."""

    def forward(self, x, mask=None):
        if x.shape[1] % 8:
            raise ValueError("the length must be a multiple of 8")
        return super().forward(x, mask=None if mask is None else mask.bool())


def test_a_module_of_long_sequences_and_masks_of_numbers():
    report = check(OfEights(8, 2), 8, only=["double loop", "boolean masks"])
    assert report.passed and report["double loop"].note.startswith("length 8")
    assert report["boolean masks"].note == "means the same"


def test_a_subclass_with_an_error_is_held_against_its_parent():
    make = {kind: Attention(8, 2, kind(8, 2), backend="explicit") for kind in (Encoded, SharedSign)}
    assert check(make[Encoded], 8, only=["double loop"]).passed
    assert not check(make[SharedSign], 8, only=["double loop"]).passed


def test_the_module_is_not_touched():
    module = Attention(8, 2, TransformerXL(8, 2)).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    check(module, 8, capabilities=["relative", "derivatives"], compiler=None)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training and all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in module.parameters())


def test_parameters_as_they_are():
    """A scheme that starts at zero hides an error; shown to, the kit judges it so."""
    module = Attention(8, 2, MelPosition(8, 2, n_freq=2))
    given = {"capabilities": ["relative", "2d", "rows"], "space": (2, 3), "only": ["sign"]}
    assert check(module, 8, randomise=False, **given)["sign"].status == FAILED


# ---- what is shown ----


def test_the_survey_names_what_failed():
    sound = Report("sound", (Check("shift", PASSED, 1e-9, 1e-5),))
    bad = Report("bad", (Check("shift", FAILED, 1.0, 1e-5, "moved by 1"), Check("sign", PASSED, 0.0, 0.0)))
    survey = Survey([sound, bad])
    assert survey.failed == ["shift (bad)"]
    text = survey.text()
    assert "1 passed" in text and "FAILED: shift" in text and "moved by 1" in text and "sign  " not in text
    assert "sign" in survey.text(verbose=True) and survey.to_dict()["passed"] is False


def test_every_capability_is_explained_and_used():
    used = {c for table in (MUTANTS, mechanisms.MECHANISMS) for entry in table.values() for c in entry.capabilities}
    assert used == set(CAPABILITIES) and all(CAPABILITIES.values())
