"""`genmodels sample`: pictures or arrays from nothing but a checkpoint."""

from __future__ import annotations


def run(
    *,
    ckpt: str,
    n: int = 64,
    seed: int = 0,
    out: str | None = None,
    cond: int | str | list[int | str] | None = None,
    temperature: float = 1.0,
    sampler: str | None = None,
    steps: int | None = None,
    spacing: str | None = None,
    eta: float | None = None,
    clip: bool | None = None,
    step_size: float | None = None,
    size: list[int] | None = None,
    batch_size: int = 64,
    start: int = 0,
    ema: bool | float = True,
    path: str | None = None,
    frames: int = 10,
    interpolate: list[int | str] | None = None,
    device: str = "auto",
    trust: list[str] | None = None,
) -> None:
    """Draw samples from a trained model.

    Arguments:
        ckpt: the checkpoint (or a run folder: its best.ckpt).
        n: number of samples.
        seed: sample k of a seed is the same alone, in any batch, on any number of processes.
        out: a .png (one grid), a .npz (arrays), or a folder (one PNG each); default a grid in the run folder.
        cond: class, or classes that are cycled; default every class in turn.
        temperature: scale of the noise, 1 for the model's own distribution.
        sampler: ddpm, ddim or dpmpp_2m for diffusion; annealed, hmc, mala or ula for energies; predictor_corrector or
            annealed_langevin for scores.
        steps: number of sampling steps: of a diffusion or a chain, densities of `annealed`, noise levels of scores.
        spacing: spacing of the times of those steps.
        eta: share of ancestral noise in ddim.
        clip: clip the estimate of the data at every step.
        step_size: first step size of an energy's chains, in standard deviations of the data.
        size: height and width (or length) of the samples, where a diffusion model is to draw another than it learnt.
        batch_size: samples drawn at once.
        start: number of the first sample; n=32 start=32 are samples 32 to 63.
        ema: averaged weights (true), raw ones (false), or the average of one decay.
        path: also write the way from noise to data, to a .png (a strip) or a .gif.
        frames: number of pictures on that way, or between two items.
        interpolate: two items (numbers of the test split, or picture files): the way between their latents, as a strip.
        device: auto, cpu, cuda, ...
        trust: further packages whose classes the checkpoint may name.
    """
    from pathlib import Path

    from genmodels.errors import InputError

    for key, value, least in (("n", n, 1), ("batch_size", batch_size, 1), ("start", start, 0), ("frames", frames, 2)):
        if value < least:
            raise InputError(f"{key} must be at least {least}, got {value}")
    if path is not None and Path(path).suffix.lower() not in (".png", ".gif"):
        raise InputError(f"path={path}: the way from noise to data is written to a .png (a strip) or a .gif")
    ckpt_path = Path(ckpt) / "best.ckpt" if Path(ckpt).is_dir() else Path(ckpt)

    from genmodels.training.archive import verify

    verify(ckpt_path)

    from genmodels.evaluation.sampling import check_target, draw, write_path, write_samples
    from genmodels.models.load import load_model, weights_of
    from genmodels.training.archive import checkpoint_hash

    model, header = load_model(ckpt_path, device=device, trust=trust or [])
    given = {"cond": cond, "sampler": sampler, "steps": steps, "spacing": spacing, "eta": eta, "clip": clip}
    given |= {"step_size": step_size, "size": size}
    given |= {"temperature": None if temperature == 1 else temperature, "ema": None if ema is True else ema}
    target = Path(out) if out is not None else default_target(ckpt_path, seed, start, n, model.spec, given)
    check_target(target, model.spec)
    if path is not None and Path(path).suffix.lower() == ".png" and not model.spec.is_image:
        raise InputError("path: a strip shows images; for points use path=path.gif")
    if interpolate is not None:
        unused = [key for key, value in given.items() if value is not None and key != "ema"]
        plain = (("n", n, 64), ("seed", seed, 0), ("start", start, 0))
        unused += [key for key, value, usual in plain if value != usual]
        if unused:
            raise InputError(f"interpolate goes from item to item, without {', '.join(unused)}; frames= is how many")
        place = Path(out) if out else None
        for line in strip(model, header, interpolate, frames, ema, place, ckpt_path, trust or []):
            print(line)
        return
    gigabytes = n * model.spec.dims * (1 if model.spec.levels else 4) / 1e9
    if gigabytes > 8:
        raise InputError(f"n={n} samples would take {gigabytes:.0f} GB: draw them in parts with n= and start=")
    options = {"sampler": sampler, "steps": steps, "spacing": spacing, "eta": eta, "clip": clip}
    options |= {"step_size": step_size, "size": size}
    options = {key: value for key, value in options.items() if value is not None}
    if path is not None:
        options["path"] = frames
    samples = draw(
        model, n, cond=cond, temperature=temperature, seed=seed, start=start, batch_size=batch_size,
        weights=weights_of(ema), **options,
    )
    samples.made |= {"checkpoint": checkpoint_hash(ckpt_path), "step": header["step"], "family": header["family"]}
    for line in write_samples(samples, model.spec, target):
        print(line)
    if path is not None:
        print(write_path(samples, model.spec, Path(path)))


def strip(model, header: dict, ends: list, frames: int, ema, target, ckpt_path, trust: list[str]) -> list[str]:
    """Write the way between two items through the latents as one row of pictures; what to tell the user.

    Raises:
        InputError: for a model without latents, data that are not images, or items that do not exist.
    """
    from genmodels.errors import InputError
    from genmodels.evaluation.interpolation import interpolate, read_ends
    from genmodels.evaluation.pictures import grid, images_of
    from genmodels.evaluation.sampling import save_png
    from genmodels.models.build import build
    from genmodels.models.load import weights_of
    from genmodels.training.archive import checkpoint_hash

    if target is not None and target.suffix.lower() != ".png":
        raise InputError(f"out={target}: the way between two items is one strip, end it in .png")
    if not hasattr(model, "latents"):
        raise InputError(f"interpolate: a {header['family']} has no latents to go through; it is for flows")
    if not (model.spec.is_image and model.spec.levels):
        raise InputError(f"interpolate shows images; these data have events of shape {model.spec.event_shape}")
    batch = read_ends(ends, lambda: build(header["config"]["data"], trust=trust).prepare(), model.spec)
    pictures = interpolate(model, batch.to(model.device), frames, weights_of(ema))
    if target is None:
        words = "-".join("".join(c if c.isalnum() else "-" for c in str(end)) for end in ends)
        target = ckpt_path.parent / "samples" / f"{ckpt_path.stem}_between-{words}.png"
    sheet = grid(images_of(pictures.cpu(), model.spec, smallest=32), columns=frames)
    made = {"between": f"{ends[0]} and {ends[1]}", "frames": frames, "weights": weights_of(ema)}
    made |= {"checkpoint": checkpoint_hash(ckpt_path), "step": header["step"], "family": header["family"]}
    save_png(sheet, target, made)
    return [f"{frames} pictures from item {ends[0]} to item {ends[1]}: {target}"]


def default_target(ckpt, seed: int, start: int, n: int, spec, given: dict):
    """Where samples go when nobody says: the `samples` folder of the run, a picture where there is one to draw.

    The name holds all that was asked for, so that no other samples are overwritten.
    """
    suffix = ".png" if spec.is_image or spec.event_shape == (2,) else ".npz"
    words = [f"{key}-{value}" for key, value in given.items() if value is not None]
    words = ["".join(c if c.isalnum() or c in "-." else "-" for c in word) for word in words]
    return ckpt.parent / "samples" / ("_".join([ckpt.stem, f"seed{seed}", f"{start}-{start + n - 1}", *words]) + suffix)
