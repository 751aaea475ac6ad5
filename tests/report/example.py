"""Tables as an evaluation makes them, out of fixed random numbers: three families on digits, two in the plane."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from sklearn.datasets import load_digits

from genmodels.core.likelihood import SingleValues
from genmodels.evaluation.report import (
    BitsLine,
    Bracket,
    CheckpointFacts,
    DataFacts,
    DensityMap,
    Drift,
    ExtremeItems,
    Fidelity,
    Item,
    Layer,
    Measures,
    NatsLine,
    Neighbours,
    NoiseLevels,
    OtherData,
    Profile,
    Reference,
    Report,
    SampleFacts,
    SamplingCost,
    Scale,
    Skipped,
    SpeechFigures,
    Sweep,
)
from genmodels.evaluation.table import Table, make_table
from genmodels.verification.check import Check

MARKS = {"exact": "=", "lower_bound": "<=", "ode": "~", "ais": "~?", "unnormalised": "-"}
DIGITS = DataFacts(
    name="digits", split="test", items=359, limited=False, item_hash="ab12" * 16, event_shape=[1, 8, 8], levels=17,
    units="levels", mel=None, num_classes=10, class_names=[str(k) for k in range(10)],
)
PLANE = replace(DIGITS, name="toy_moons", items=500, event_shape=[2], levels=None, units="the data's own",
                num_classes=None, class_names=[])
MACHINE = {"version": "0.1", "torch": "2.11", "python": "3.11", "device": "cpu", "threads": 1}


def line(kind: str, label: str, how: str, nats: np.ndarray, key: str, **more) -> BitsLine | NatsLine:
    """One likelihood, of integers where it has `bits_per_dim`."""
    order = nats.argsort()
    found = {
        "kind": kind, "mark": MARKS[kind], "mean_nats": float(nats.mean()), "se_data": 0.0123, "se_items": None,
        "se_mc": 0.002, "single": SingleValues(0.0, 1.0), "n": len(nats), "nonfinite": 0, "nonfinite_first": [],
        "label": label, "how": how, "seconds": 3.2, "made": {"estimate": label, "seed": 0, "weights": "ema"},
        "parts_nats": {}, "values": key, "worst": items(nats, order[:5]), "best": items(nats, order[::-1][:5]), **more,
    }
    return BitsLine(unit="bits_per_dim", **found) if "bits_per_dim" in more else NatsLine(unit="nats", **found)


def items(nats: np.ndarray, rows: np.ndarray) -> list[Item]:
    return [Item(int(k), float(nats[k]), 0.0) for k in rows]


def checkpoint(family: str) -> CheckpointFacts:
    return CheckpointFacts(f"runs/{family}/best.ckpt", "cd" * 32, 20000, None, family, 1234567, "ema", 1234.5)


def of_digits(hostile: str = "") -> tuple[Table, list[dict]]:
    """A table of a diffusion model, a flow and an energy on digits; `hostile` is appended to names of all kinds."""
    rng, images = np.random.default_rng(0), load_digits().images.astype(np.uint8)[:, None]
    reports, arrays = [], []
    lines = {
        "ddpm": [("lower_bound", "bound", "all of 999 terms", 2.10), ("ode", "probability-flow ODE", "dopri5", 2.05)],
        "glow": [("lower_bound", "K = 1", "uniform dequantisation", 2.31), ("lower_bound", "K = 64", "uniform", 2.27)],
        "energy": [("ais", "annealed importance sampling", "64 chains", 2.4)],
    }
    scale = Scale({"name": "classifier" + hostile}, 359, {
        "other held-out items": Measures(**measures(1.2, 0.001)), "noise" + hostile: Measures(**measures(310.0, 9.0))})
    for number, (family, kinds) in enumerate(lines.items()):
        own: dict[str, np.ndarray] = {}
        rows = []
        for k, (kind, label, how, bits) in enumerate(kinds):
            own[f"nats_{k}"] = nats = -bits * 64 * math.log(2) + rng.normal(0, 12, 359) - rng.exponential(8, 359)
            more = {"optimistic": True, "bracket": Bracket(2.3, 2.6)} if kind == "ais" else {}
            rows.append(line(kind, label, how + hostile, nats, f"nats_{k}", bits_per_dim=bits, **more))
        order = own["nats_0"].argsort()
        own |= {"samples_x": images[number * 64 : number * 64 + 64], "samples_index": np.arange(64),
                "samples_cond": np.arange(64) % 10, "least_x": images[order[:8]], "most_x": images[order[::-1][:8]],
                "neighbours_x": images[:8], "neighbours_train": images[8:16],
                "ood_0_nats": own["nats_0"][:200] - 20 + rng.normal(0, 30, 200), "ood_0_x": images[30:38]}  # fmt: skip
        layers = [Layer(f"flow.{i}", ["ActNorm", "Mix", "AffineCoupling"][i % 3], float(rng.normal(0, 0.3)),
                        float(10 ** rng.uniform(-7.5, -4.5)) * (i % 7 > 0), None, 1.5, 12.0) for i in range(24)]
        levels = NoiseLevels([*np.linspace(15, -15, 40).tolist(), -math.inf],
                             (2.3 * np.exp(-((np.linspace(15, -15, 40) - 1) ** 2) / 20)).tolist())
        profile = {"ddpm": Profile(diffusion=levels), "glow": Profile(flow=layers), "energy": Profile()}[family]
        steps, rest = [5, 10, 20, 50, 200], [0.1] * 5
        over = {"key": "temperature", "sampler": None, "values": [0.5, 0.7, 0.9, 1.0, 1.1]}
        over = {"key": "steps", "sampler": "dpmpp_2m", "values": steps} if family == "ddpm" else over
        sweep = Sweep(**over, n=359, frechet=[40.0, 9.0, 6.0, 5.2, 5.1], frechet_error=rest, kernel=rest,
                      kernel_error=rest, precision=[0.4, 0.7, 0.75, 0.8, None], precision_error=rest,
                      recall=[0.2, 0.5, 0.6, 0.7, 0.7], recall_error=rest, evaluations=steps,
                      samples_per_second=[900, 450, 220, 90, 22])
        reports.append(Report(
            created="", name="", genmodels=MACHINE, checkpoint=checkpoint(family + hostile), data=DIGITS,
            config={"model": {"_target_": f"genmodels.models.{family}" + hostile}, "seed": 0},
            likelihood=rows, profile=profile, scale=scale,
            references=[Reference("uniform", "bits_per_dim", math.log2(17)),
                        Reference("best per-pixel histogram", "bits_per_dim", 2.45)],
            items=ExtremeItems(0, items(own["nats_0"], order[:8]), items(own["nats_0"], order[::-1][:8])),
            checks=[Check("round trip", "passed", 1.0, 1.0, hostile),
                    Check("drift per layer", "not verified", 2e-3, 1e-3, "flow.3"),
                    Check("density integrates to one", "failed", 0.9, 1e-3, "plane")],
            drift=Drift(None, 1e-3, 0.1) if family == "glow" else {},
            fidelity=Fidelity(
                network={"name": "classifier" + hostile, "sha256": "ef" * 32, "accuracy": 0.981,
                         "interval": [0.961, 0.991], "dims": 64, "note": ""},
                **measures(5.1 + number, 0.0123),
                memorisation={"duplicates": 0, "closer": 0.02, "flagged": family == "energy",
                              "said": "no copies: 2.0 % closer than the held-out 1st percentile" + hostile},
                class_accuracy={"accuracy": 0.93, "n": 359, "interval": [0.9, 0.95], "real": 0.97,
                                "real_interval": [0.95, 0.984], "confusion": (np.eye(10, dtype=int) * 33 + 1).tolist()},
            ),
            sampling=SamplingCost(
                sampler="dpmpp_2m", steps=20, evaluations=20, samples_per_second=123.4, batch_size=64,
                latency={"p50": 0.0123, "p95": 0.02, "n": 20}, peak_memory=3 * 2**28, seed=0, seconds=3.0,
                context="cpu, 1 thread, 32-true, not compiled"),
            sweeps=[sweep],
            samples=SampleFacts(x="samples_x", cond="samples_cond", index="samples_index", outside=None,
                                made={"sampler": "dpmpp_2m" + hostile, "steps": 20, "seed": 0}),
            neighbours=Neighbours([1.5] * 8, list(range(8))),
            ood=[OtherData(
                name="fashion_mnist" + hostile, overrides={}, n=200, auroc=0.612, value="bits_per_dim",
                scores={"typicality": (0.7, 0.01)},
                kind=rows[0].kind, label=rows[0].label, mean_in=2.1, mean_out=2.5, values="ood_0_nats",
                inside="nats_0", said="the other data are separated badly" + hostile)],
            warnings=["one layer drifts" + hostile] if family == "glow" else [],
        ))
        arrays.append(own)
    table = make_table(reports, arrays, command="python evaluate.py 'ckpt=[a,b,c]'" + hostile,
                       failures=[("runs/cut.ckpt", "the file is cut" + hostile)])
    return table, arrays


def measures(frechet: float, kernel: float) -> dict:
    """Measures of samples with their errors."""
    return {"n": 359, "frechet": frechet, "frechet_error": 0.1 * frechet, "kernel": kernel, "kernel_error": 0.004,
            "precision": 0.8, "precision_error": 0.021, "recall": 0.7, "recall_error": 0.024}


def of_speech(hostile: str = "") -> tuple[Table, list[dict]]:
    """A table of two text-to-mel models with the sound of two texts; one sample is too loud."""
    spoken = replace(DIGITS, name="speech", items=2, event_shape=[80, 40], levels=None, units="the data's own",
                     mel={"sample_rate": 8000, "hop": 64}, num_classes=None, class_names=[])
    reports, arrays = [], []
    for number, family in enumerate(("glow_tts", "mel_ddpm")):
        nats = np.array([-900.0, -1000.0 - number])
        own = {f"{kind}_{k}": (3000 * np.sin(np.arange(4000) * (k + 1) / (9 - number))).astype(np.int16)
               for kind in ("sound", "vocoded") for k in range(2)}
        if number:
            own["sound_1"] = own["sound_1"][:0]
        speech = SpeechFigures(utterances=2, mcd_mel13=9.0, mcd_each=[8.0, 10.0], length_ratio=1.0, seconds=[0.1, 0.1],
                               failures_per_100={"any": 0.0}, real_time_factor=0.1, sound=[1.0, 1.0],
                               recognition=Skipped("no recogniser"), played=["turn right" + hostile, "turn left"])
        reports.append(Report(
            created="", name="", genmodels=MACHINE, checkpoint=checkpoint(family), config={}, data=spoken,
            speech=speech, likelihood=[line("exact", "density", "", nats, "nats_0", nll=900.0, nll_per_dim=0.3)],
        ))
        arrays.append(own | {"nats_0": nats})
    return make_table(reports, arrays), arrays


def of_spoken_digits() -> tuple[Table, list[dict]]:
    """A model of mels by class, with the sound of the first sample of each of three classes."""
    spoken = replace(DIGITS, name="spoken_digits", items=3, event_shape=[80, 40], levels=None, num_classes=3,
                     units="the data's own", mel={"sample_rate": 8000, "hop": 64}, class_names=["no", "yes", "stop"])
    nats = np.array([-900.0, -950.0, -1000.0])
    own = {"nats_0": nats, "samples_cond": np.arange(6) % 3, "samples_index": np.arange(6),
           **{f"sound_{k}": np.full(800, 100 * (k + 1), dtype=np.int16) for k in range(3)}}
    report = Report(created="", name="", genmodels=MACHINE, checkpoint=checkpoint("ddpm"), config={}, data=spoken,
                    likelihood=[line("exact", "density", "", nats, "nats_0", nll=900.0, nll_per_dim=0.3)])
    return make_table([report], [own]), [own]


def of_points() -> tuple[Table, list[dict]]:
    """A table of two models of points in the plane, one with a density."""
    rng = np.random.default_rng(1)
    grid = np.linspace(-3, 3, 80)
    x, y = np.meshgrid(grid, grid)
    true = np.logaddexp(-((x - 1) ** 2 + y**2), -((x + 1) ** 2 + y**2)) - math.log(2 * math.pi)
    data = rng.normal(0, 0.707, (500, 2)) + np.where(rng.random((500, 1)) < 0.5, [[1, 0]], [[-1, 0]])
    reports, arrays = [], []
    for family, kind in (("nsf", "exact"), ("score", "unnormalised")):
        nats = rng.normal(-2.4, 1, 500)
        number = {"nll": 2.4, "nll_per_dim": 1.2, "entropy": 2.35, "kl_gap": 0.05}
        if kind == "unnormalised":
            number = {"nll": None, "nll_per_dim": None, "reason": "a field of scores has no energy"}
        own = {"samples_x": data + rng.normal(0, 0.2, data.shape), "samples_index": np.arange(500)}
        found = Report(
            created="", name="", genmodels=MACHINE, checkpoint=checkpoint(family), config={}, data=PLANE,
            likelihood=[line(kind, "density", "", nats, "nats_0", **number | {"se_data": 0.05, "se_mc": None})],
            references=[Reference("exact entropy", "nats", 2.35)], fidelity=Skipped("points have no network"),
            samples=SampleFacts(x="samples_x", cond=None, index="samples_index", made={"seed": 0}, outside=None),
        )
        if kind == "exact":
            own |= {"nats_0": nats, "density": true + rng.normal(0, 0.1, true.shape), "density_true": true,
                    "density_data": data, "least_x": data[:8], "most_x": data[8:16]}  # fmt: skip
            found.density = DensityMap([-3, 3, -3, 3], kind)
            found.items = ExtremeItems(0, items(nats, np.arange(8)), items(nats, np.arange(8)))
            found.checks = [Check("density integrates to one", "failed", 0.07, 1e-3, "1.07000 on a grid")]
        reports.append(found)
        arrays.append(own)
    return make_table(reports, arrays), arrays
