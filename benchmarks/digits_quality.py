"""Classification of class-conditional digit samples of a trained model by a support-vector machine.

The classifier is scikit-learn's SVC, fitted on real training and validation digits (17 levels) and scored on the real
test split; its accuracy on the samples is printed too.

    python benchmarks/digits_quality.py runs/ddpm-digits/<time>/best.ckpt [n]

Models of the families ddpm and score are asked for samples in the ways listed in `WAYS`.
"""

from __future__ import annotations

import argparse
import json

import torch
from sklearn.svm import SVC

from genmodels.core.samples import SamplingOptions
from genmodels.data.vision import Digits
from genmodels.evaluation.samples import draw
from genmodels.models.checkpoint import load_model

#: Options of sampling for each family.
WAYS: dict[str, dict[str, dict]] = {
    "ddpm": {"dpmpp_2m_20": {"sampler": "dpmpp_2m", "steps": 20}, "ddpm_all": {"sampler": "ddpm"}},
    "score": {
        "dpmpp_2m_20": {"sampler": "dpmpp_2m", "steps": 20},
        "predictor_corrector": {"sampler": "predictor_corrector"},
        "annealed_langevin": {"sampler": "annealed_langevin"},
    },
}


def fitted_classifier() -> tuple[SVC, float]:
    """The fitted classifier and its accuracy on the real test split."""
    data = Digits().prepare()
    x, y = {}, {}
    for split in ("train", "val", "test"):
        batches = list(data.loader(split, 2048))
        x[split] = torch.cat([b.x for b in batches]).flatten(1).numpy().astype("float64")
        y[split] = torch.cat([b.cond for b in batches]).numpy()
    classifier = SVC(C=10, gamma=0.001)
    classifier.fit([*x["train"], *x["val"]], [*y["train"], *y["val"]])
    return classifier, float(classifier.score(x["test"], y["test"]))


def main() -> None:
    """Print one JSON line: accuracy on real test digits and on n samples, for each way of sampling."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("n", type=int, nargs="?", default=500)
    given = parser.parse_args()
    classifier, real = fitted_classifier()
    model, header = load_model(given.checkpoint)
    n = given.n
    out = {"svm_on_real_test": round(real, 4), "n": n, "step": header["step"]}
    for name, options in WAYS.get(model.family, {"default": {}}).items():
        samples = draw(model, SamplingOptions(n=n, **options), batch_size=250, progress=False)
        read = classifier.predict(samples.x.flatten(1).numpy().astype("float64"))
        out[name] = round(float((read == samples.cond.numpy()).mean()), 4)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
