"""The table: ranks within a kind, ties by pairs, what bounds show, and what is refused."""

from __future__ import annotations

import csv
import io
import math

import pytest
import torch

from genmodels.core.errors import InputError
from genmodels.core.likelihood import SingleValues, paired
from genmodels.evaluation.report import (
    BitsLine,
    Bracket,
    CheckpointFacts,
    DataFacts,
    Fidelity,
    Reference,
    Report,
    SamplingCost,
    Sweep,
    Utterance,
)
from genmodels.evaluation.table import Table, _rate, make_table, measured, same_items, two_errors
from genmodels.report.compare import in_one_network
from genmodels.report.likelihoods import as_csv, as_markdown, as_text

DIMS, LEVELS = 64, 17


def line(kind: str, nats: torch.Tensor, **more) -> BitsLine:
    scale, spread = DIMS * math.log(2), float(nats.std(correction=min(1, len(nats) - 1)))
    mark = {"exact": "=", "lower_bound": "<=", "ais": "~?", "ode": "~"}.get(kind, "-")
    return BitsLine(**{
        "label": kind, "kind": kind, "mark": mark, "unit": "bits_per_dim", "mean_nats": float(nats.mean()),
        "bits_per_dim": -float(nats.mean()) / scale, "se_data": spread / math.sqrt(len(nats)) / scale,
        "se_items": None, "se_mc": None, "single": SingleValues(None, 0.0), "how": "", "n": len(nats), "nonfinite": 0,
        "nonfinite_first": [], "worst": [], "best": [], "parts_nats": {}, "made": {}, "values": "nats_0"} | more)


def report(path: str, *lines: BitsLine, **data) -> Report:
    facts = {"name": "digits", "split": "test", "items": 200, "limited": False, "item_hash": "a",
             "event_shape": [1, 8, 8], "levels": LEVELS, "units": "levels", "mel": None, "num_classes": 10,
             "class_names": []}
    return Report(
        created="", genmodels={}, name="", config={}, data=DataFacts(**facts | data), likelihood=list(lines),
        checkpoint=CheckpointFacts(path, "", 1, None, "glow", 9, "ema", None),
        references=[Reference("uniform", "bits_per_dim", math.log2(17))],
    )


def nats(mean: float, seed: int = 0, n: int = 200) -> torch.Tensor:
    shared = 8 * torch.randn(n, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return mean + shared + 0.1 * torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def table_of(*pairs: tuple[str, torch.Tensor], **options) -> Table:
    reports = [report(f"runs/{k}/best.ckpt", line(kind, values)) for k, (kind, values) in enumerate(pairs)]
    return make_table(reports, [{"nats_0": values} for _, values in pairs], **options)


def test_slow_samples_are_not_shown_as_none():
    assert [_rate(value) for value in (1234.56, 1.0, 0.0312, 0.00004)] == ["1234.6", "1.0", "0.031", "4e-05"]


@pytest.mark.parametrize(("size", "said"), [(64, False), (16, True)])
def test_small_batches_of_the_samples_per_second_are_named(size, said):
    one, values = report("a.ckpt", line("exact", nats(-100))), {"nats_0": nats(-100)}
    one.sampling = SamplingCost(
        sampler=None, steps=None, evaluations=1, samples_per_second=9.0, batch_size=size, seed=0, seconds=1.0,
        latency={"p50": 0.1, "p95": 0.2, "n": 3}, peak_memory=None, context="cpu")
    assert ("samples/s in batches of 16" in " ".join(make_table([one], [values]).notes)) == said


def test_ranks_are_given_within_a_kind_and_ties_are_found_by_pairs():
    # The items differ by 8 nats, the models by 1: only pairs of values can tell them apart.
    table = table_of(("lower_bound", nats(-100)), ("lower_bound", nats(-101, 1)), ("lower_bound", nats(-101, 2)),
                     ("exact", nats(-90)))
    (group,) = table.ranking
    assert group.kind == "lower_bound" and group.order in ([[0], [2, 1]], [[0], [1, 2]])
    assert [row.cells[9] for row in table.rows] == ["1", "2", "2", ""]
    assert any("not ranked" in note for note in table.notes)
    across = table_of(("lower_bound", nats(-100)), ("exact", nats(-90)), rank="across")
    assert [row.cells[9] for row in across.rows] == ["2", "1"]
    assert any("lower_bound may be worse than the true value" in note for note in across.notes)
    assert not any("several lines" in note for note in across.notes)
    several = [line("lower_bound", nats(-100)), line("ode", nats(-95), values="nats_1")]
    reports = [report("runs/0/best.ckpt", *several), report("runs/1/best.ckpt", line("exact", nats(-99)))]
    two = make_table(reports, [{"nats_0": nats(-100), "nats_1": nats(-95)}, {"nats_0": nats(-99)}], rank="across")
    assert [row.cells[9] for row in two.rows] == ["", "1", "2"] and any("several lines" in note for note in two.notes)


def test_models_that_are_equal_share_their_rank():
    table = table_of(("exact", nats(-100)), ("exact", nats(-100)), ("exact", nats(-100) - 1e-3))
    assert table.ranking[0].order == [[0, 1], [2]]


def test_values_given_the_class_are_ranked_apart(monkeypatch):
    values = [nats(-100), nats(-101, 1), nats(-102, 2)]
    given = {"made": {"given": "class"}, "class_cost": math.log2(10) / DIMS}

    def ranking() -> Table:
        reports = [report("a", line("lower_bound", values[0], **given)), report("b", line("lower_bound", values[1])),
                   report("c", line("lower_bound", values[2]))]
        return make_table(reports, [{"nats_0": v} for v in values])

    table = ranking()
    (group,) = table.ranking
    assert (group.kind, group.given, group.order) == ("lower_bound", "", [[1], [2]])
    assert any("another quantity" in note for note in table.notes)
    at_most = -float(values[0].mean()) / DIMS / math.log(2) + math.log2(10) / DIMS
    assert any(f"classes drawn evenly, at most {at_most:.4f}(" in note for note in table.notes)
    # One ranking for both quantities is seen.
    monkeypatch.setattr("genmodels.evaluation.table.condition_of", lambda line: "")
    assert ranking().ranking[0].order == [[0], [1], [2]]


@pytest.mark.parametrize("given, worse, concluded", [
    (("", ""), -81, True), (("class", "class"), -81, True), (("class", ""), -81, False), (("class", ""), -84, True),
    (("", "class"), -84, False),
])  # fmt: skip
def test_a_bound_given_the_class_shows_less_by_the_logarithm_of_their_number(given, worse, concluded):
    """log p(x) >= log p(x | y) - log 10, here 2.3 nats; what p(x | y) says of p(x) from above is nothing."""
    reports, arrays = [], []
    for kind, mean, what in zip(("lower_bound", "ais"), (-80, worse), given, strict=True):
        values = mean + 0.01 * (nats(0) - nats(0).mean())
        own = {"made": {"given": what}, "class_cost": math.log2(10) / DIMS} if what else {}
        reports.append(report(f"{kind}.ckpt", line(kind, values, **own)))
        arrays.append({"nats_0": values})
    assert bool(make_table(reports, arrays).conclusions) is concluded


def test_a_line_that_stands_in_two_rankings_is_shown_in_both():
    values = nats(-100)
    said = Utterance(rank=1, index=0, frames=9, nats_per_dim=1.0, z=None, evidence=0.5, durations=[9])
    one = report("a.ckpt", line("exact", values))
    one.audit = [said]
    notes = make_table([one], [{"nats_0": values}]).notes
    shown = "1:   1. 1.000 nats/dim, 9 frames, evidence +0.50: item 0"
    assert [note for note in notes if "item 0" in note] == [shown, shown]


@pytest.mark.parametrize(
    "better, worse, concluded",
    [("exact", "exact", True), ("lower_bound", "exact", True), ("exact", "lower_bound", False),
     ("lower_bound", "lower_bound", False), ("lower_bound", "ais", True), ("exact", "ode", False),
     ("ode", "exact", False), ("ais", "exact", False)],
)
def test_only_what_bounds_show_is_a_conclusion(better, worse, concluded):
    table = table_of((better, nats(-80)), (worse, nats(-140, 1)))
    assert bool(table.conclusions) is concluded
    if concluded:
        assert table.conclusions[0].startswith("glow (0) is better than glow (1): at most ")


def test_few_items_show_less():
    """Equal models on 3 items: what two standard errors show falsely in one of twenty tables, Student's do in fewer."""
    draw, found = torch.Generator().manual_seed(0), 0
    for _ in range(200):
        found += bool(table_of(*(("exact", -100 + torch.randn(3, generator=draw)) for _ in range(2))).conclusions)
    assert found <= 2


def test_dequantised_energies_bound_nothing_from_below():
    """A model against itself: the bound of more dequantisations is below the least value by fewer."""
    def reports(**made):
        lines = [line("ais", nats(-100 + k), made=made, bracket=Bracket(2.2 - 0.2 * k, 2.3 - 0.2 * k)) for k in (0, 1)]
        return [report(f"runs/{k}/best.ckpt", line("lower_bound", nats(-60)), *lines) for k in range(2)]

    arrays = [{"nats_0": nats(-60)}] * 2
    assert make_table(reports(dequantisation="uniform"), arrays).conclusions == []
    assert len(make_table(reports(), arrays).conclusions) == 2  # the largest difference of each pair


@pytest.mark.parametrize("upper, order", [(2.3, [[0, 1]]), (None, [[0, 1]]), (2.0, [[0], [1]])])
def test_annealing_is_ranked_by_its_bracket(upper, order):
    """An energy of 1.8 to `upper` against a flow of 2.25 bits/dim."""
    values = [nats(-80), nats(-100, 1)]
    lines = [line("ais", values[0], bracket=Bracket(1.7, upper)), line("exact", values[1])]
    reports = [report(f"runs/{k}/best.ckpt", one) for k, one in enumerate(lines)]
    table = make_table(reports, [{"nats_0": one} for one in values], rank="across")
    assert [group.order for group in table.ranking] == [order]


def test_a_single_item_tells_no_difference():
    assert paired(torch.tensor([1.0]), torch.tensor([2.0])) == (-1.0, math.inf)
    equal = ("exact", torch.tensor([-100.0])), ("exact", torch.tensor([-101.0]))
    assert table_of(*equal).ranking[0].order == [[0, 1]]


@pytest.mark.parametrize("key, value", [("name", "mnist"), ("split", "val"), ("item_hash", "b"), ("levels", 256)])
def test_unlike_items_are_refused(key, value):
    with pytest.raises(InputError, match=f"their data {key} differ"):
        same_items([report("a"), report("b", **{key: value})])


def test_the_same_cells_in_every_form():
    table = table_of(("lower_bound", nats(-100)), ("exact", nats(-90)))
    text, markdown = as_text(table), as_markdown(table)
    for row in table.rows:
        assert all(cell in text and cell in markdown for cell in row.cells)
    assert "<= means" in text and "reference on digits: uniform 4.0875 bits/dim" in text


def test_the_values_for_programs_are_numbers_and_what_each_kind_bounds():
    reports = [report("a.ckpt", line("lower_bound", nats(-100))), report("b.ckpt", line("ais", nats(-90))),
               report("c.ckpt", line("exact", nats(-95))), report("d.ckpt")]
    reports[0].fidelity = Fidelity(
        network={}, n=200, frechet=3.25, frechet_error=0.5, kernel=-0.001, kernel_error=0.002, precision=0.5,
        precision_error=0.03, recall=0.25, recall_error=0.02, memorisation={"said": ""})
    table = make_table(reports, [{"nats_0": nats(mean)} for mean in (-100, -90, -95, -1)])
    bound, optimistic, exact, none = csv.DictReader(io.StringIO(as_csv(table)))
    for row, (found,) in zip((bound, optimistic, exact), [r.likelihood for r in reports[:3]], strict=True):
        assert float(row["value"]) == found.bits_per_dim and float(row["error"]) == found.se_data
        low, high = (found.bits_per_dim + side * two_errors(found.n) * found.se_data for side in (-1, 1))
        assert row["low"] == ("" if row is bound else str(low))
        assert row["high"] == ("" if row is optimistic else str(high))
    assert [row["kind"] for row in (bound, optimistic, exact, none)] == ["lower_bound", "ais", "exact", ""]
    assert [bound[key] for key in ("frechet", "frechet_error", "kernel_distance", "samples", "parameters")] == [
        "3.25", "0.5", "-0.001", "200", "9"]
    assert exact["frechet"] == none["value"] == "" and exact["unit"] == "bits_per_dim" and exact["items"] == "200"


def test_the_parts_of_an_error_are_stated_and_add_up():
    error = {"se_data": 0.05, "se_items": 0.03, "se_mc": 0.04}
    table = make_table([report("a", line("lower_bound", nats(-90), **error))], [{"nats_0": nats(-90)}])
    assert "1: the error 0.0500 combines, in squares, 0.0300 from the items, 0.0400 from the draws" in table.notes
    table = make_table([report("a", line("lower_bound", nats(-90), **error | {"se_items": 0.0}))], [{}])
    assert any("an unmeasurably small part from the items, 0.0400 from the draws" in note for note in table.notes)


def test_a_model_without_a_likelihood_has_no_number():
    table = make_table([report("a", line("unnormalised", nats(-90), reason="no constant"))], [{"nats_0": nats(-90)}])
    assert table.rows[0].cells[5] == "none" and "1: no likelihood: no constant" in table.notes
    assert table.ranking == []


def test_distances_in_the_features_of_another_network_stand_in_no_column():
    reports = [report(f"runs/{k}/best.ckpt", line("exact", nats(-60.0))) for k in range(4)]
    memorisation = {"said": "no copies"}
    for one, sha256 in zip(reports, ["a", "b", None, "a"], strict=True):
        if sha256 is not None:
            measures = {"n": 9} | {key + part: 0.5 for key in ("frechet", "kernel", "precision", "recall")
                                   for part in ("", "_error")}
            one.fidelity = Fidelity(**measures, network={"name": "classifier", "sha256": sha256},
                                    memorisation=memorisation)
            one.sweeps = [Sweep(key="steps", sampler=None, n=9, values=[])]
    shown = in_one_network(reports)
    assert [len(one.sweeps) for one in shown] == [1, 0, 0, 1]
    assert [isinstance(one.fidelity, Fidelity) for one in shown] == [True, False, False, True]
    assert shown[0] is reports[0] and isinstance(reports[1].fidelity, Fidelity)  # its own file has them
    assert "samples were not compared: not in the features of the first model" in as_text(
        make_table(shown, [{"nats_0": nats(-60.0)}] * 4))


@pytest.mark.parametrize("error", [math.inf, math.nan])
def test_a_value_of_unknown_error_is_printed(error):
    assert measured(1.25, error).startswith("1.250")
