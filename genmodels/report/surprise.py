"""Other data under the same model: likelihoods of what does not belong, beside those of the test items."""

from __future__ import annotations

import numpy as np

from genmodels.report.likelihoods import histogram, noise_of
from genmodels.report.markup import Markup, tag
from genmodels.report.raster import address, is_image, tiles
from genmodels.report.view import KINDS, Model, listing, number


def out_of_distribution(models: list[Model]) -> list[Markup]:
    """Histograms with the area under the ROC curve; 0.5 is chance, below it the other data are the likelier ones."""
    rows, figures = [], []
    for model in models:
        for k, found in enumerate(model.get("ood") or []):
            name, kind = str(found.get("name")), str(found.get("kind") or "unnormalised")
            unit = {"bits_per_dim": "bits/dim"}.get(found.get("value"), str(found.get("value") or "nats"))
            rows.append([f"{model.name} on {name}", kind.replace("_", " "), found.get("label"),
                         number(found.get("auroc")), number(found.get("mean_in")), number(found.get("mean_out")), unit,
                         number(found.get("n")), found.get("said")])
            inside, outside = model.array(found.get("inside")), model.array(found.get("values"))
            if inside is None or outside is None:
                continue
            bits = unit == "bits/dim"
            values = [model.per_item(v)[0] if bits else -np.asarray(v, dtype=np.float64) for v in (inside, outside)]
            title = f"{model.name}: {model.data.get('name')} against {name}"
            if found.get("auroc") is not None:
                title += f", AUROC {found['auroc']:.3f}"
            legend = [f"{model.data.get('name')} (test)", name]
            line = next(iter(model.likelihoods), {})  # the line that other data are evaluated by
            noise = "" if line.get("single", {}).get("noise", 0.0) == 0 else f"Of the test items {noise_of(line)}."
            shown = histogram(legend, values, title, f"{unit} of an item (left: more likely)", noise=noise)
            figures.append(tag("div", shown, tag("p", KINDS[kind][1] + ".", class_="note"), _likely(model, k, name)))
    if not rows:
        return []
    columns = ["model", "kind", "likelihood", "AUROC", "mean inside", "mean outside", "unit", "items", "verdict"]
    caption = "Whether the likelihood tells other data from the test items: AUROC 1 always, 0.5 by chance, 0 never"
    return [listing(columns, [(None, rows)], caption), tag("div", *figures, class_="gallery") if figures else None]


def _likely(model: Model, k: int, name: str) -> Markup | None:
    x = model.array(f"ood_{k}_x")
    if x is None or not is_image(model.data) or list(x.shape[1:]) != list(model.data["event_shape"]):
        return None
    shown = [tag("li", tag("img", src=address(tile), alt=f"likely item {i + 1} of {name}"))
             for i, tile in enumerate(tiles(x, model.data))]
    return tag("figure", tag("figcaption", f"the most likely items of {name}"), tag("ul", *shown, class_="items"))
