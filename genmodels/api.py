"""The library in one import: `import genmodels as gm`, then `gm.load`, `gm.train`, `gm.evaluate`.

Names and defaults are those of the commands, whose code this calls: `model.sample(16, cond=3, steps=20)` draws the
samples of `genmodels sample n=16 cond=3 steps=20`. A usage error of a command (exit code 2) is an InputError here, with
the same message; a failure is a RunError.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from genmodels.cli.schema import Schema
from genmodels.core import samples as core
from genmodels.core.data import Batch, DataSpec, TextCondition
from genmodels.core.errors import InputError, Interrupted, an, as_input_errors, at_least, first_line, require_known
from genmodels.core.files import located
from genmodels.core.likelihood import Likelihood
from genmodels.core.samples import DEFAULT_NUMBER, SamplingOptions, require_partners
from genmodels.core.tensors import html_table
from genmodels.evaluation.materials import data_of, material
from genmodels.evaluation.samples import check_target, draw, write_path, write_samples
from genmodels.models.base import GenerativeModel
from genmodels.models.checkpoint import Source, load_model, weights_of
from genmodels.plots.images import has_picture, picture_of, show

if TYPE_CHECKING:
    from genmodels.cli.say import Speech
    from genmodels.cli.transcribe import Transcript
    from genmodels.report.compare import Comparison
    from genmodels.verification.check import Findings

_COLUMNS = 12  # of a table in a notebook, at most


class Samples(core.Samples):
    """Samples with the description of their data: a picture in notebooks, a file by `save`.

    Attributes:
        x, cond, index, made, path, mask: as of `genmodels.core.samples.Samples`; x (n, *event) in the data's own units.
        spec: the data.

    Example:
        >>> points = Samples.of(core.Samples(torch.zeros(2, 3), None, torch.arange(2), {}), DataSpec("table", (3,)))
        >>> points
        2 samples of table (3,)
        >>> points.save("points.txt")
        Traceback (most recent call last):
        ...
        genmodels.core.errors.InputError: out=points.txt: end it in .png (a grid), .npz (arrays), ...
    """

    spec: DataSpec

    @classmethod
    def of(cls, drawn: core.Samples, spec: DataSpec) -> Samples:
        """Samples of a data set."""
        found = cls(**{field.name: getattr(drawn, field.name) for field in fields(core.Samples)})
        found.spec = spec
        return found

    @property
    def picture(self) -> Image.Image | None:
        """A grid of images or mels, a scatter plot of points; None for other data."""
        return picture_of(self.x, self.spec, self.cond if isinstance(self.cond, Tensor) else None, self.index)

    def save(self, out: str | Path) -> Path:
        """Write a .png (one grid), a .npz (arrays), a .csv (of vectors), a .txt (texts) or a folder (single files).

        Raises:
            InputError: for a form that these samples do not have, or a place that cannot be written.
        """
        from genmodels.cli.sample import check_replaced

        out = Path(out).expanduser()
        check_target(out, self.spec)
        check_replaced(out, self.spec, self.index.tolist())
        write_samples(self, self.spec, out)
        return out

    def save_path(self, out: str | Path, frames: int = 10) -> Path:
        """Write the trajectory from noise to data as .png (a strip) or .gif, for samples drawn with `path=80` or more.

        Raises:
            InputError: if none was kept.
        """
        if self.path is None:
            raise InputError("no trajectory was kept: draw the samples with path=80, then show some of its frames")
        write_path(self, self.spec, out := Path(out).expanduser(), frames)
        return out

    def show(self) -> None:
        """Show the picture, or the table: in a notebook there, else in a window."""
        show(self, self.picture)

    def __repr__(self) -> str:
        return f"{len(self.x)} samples of {self.spec.name} {self.spec.event_shape}"

    def _repr_png_(self) -> bytes | None:
        if (picture := self.picture) is not None:
            picture.save(held := io.BytesIO(), format="PNG")
        return None if picture is None else held.getvalue()

    def _repr_html_(self) -> str | None:
        if has_picture(self.spec):
            return None
        names = list(self.spec.columns or self.spec.names_of_columns)[:_COLUMNS]
        rows = {"": names} if len(self.spec.event_shape) == 1 else {}
        rows |= {str(number): [f"{value:.4g}" for value in x.flatten()[:_COLUMNS].tolist()]
                 for number, x in zip(self.index.tolist()[:DEFAULT_NUMBER], self.x, strict=False)}
        return html_table(repr(self), rows)


class Model:
    """A trained model, as `load` and `train` return it.

    Attributes:
        network: the LightningModule, of a class in `genmodels.models`.
        spec: the data that it was built for.
        header: the header of its checkpoint: family, config, step, figures, ...
        ckpt: the file or folder it was loaded from.
    """

    def __init__(self, network: GenerativeModel, header: dict[str, Any], ckpt: str | Path, trust: Sequence[str] = ()):
        self.network, self.header, self.ckpt, self.trust = network, header, ckpt, list(trust)
        self._source = Source(network, header, ckpt)

    @property
    def spec(self) -> DataSpec:
        """The data that the model was built for."""
        return self.network.spec

    @property
    def family(self) -> str:
        """ddpm, glow, energy, ..."""
        return self.network.family

    def items(self, n: int | None = None, split: str = "test") -> Batch:
        """The first items of a split of the data that the model was trained on; all of them by default.

        Raises:
            InputError, RunError: for n below 1, a split that does not exist, or missing data.
        """
        at_least(1, n=1 if n is None else n)
        data = data_of(self.network, self.header, self.ckpt, self.trust)()
        return data.items(split, None if n is None else torch.arange(min(n, len(data.split(split)))))

    def sample(
        self, n: int | None = None, cond: int | str | list[int | str] | None = None, *, ema: bool | float = True,
        inpaint: int | str | None = None, mask: str | None = None, edit: int | str | None = None,
        batch_size: int = DEFAULT_NUMBER, progress: bool = True, **options: Any,
    ) -> Any:
        """Draw samples, or synthesise texts: `Samples`, or `Speech` of a text-to-speech model.

        Arguments:
            n: number of samples, 64 by default; with text the number of takes, 1 by default.
            cond: class, or classes that are cycled; None for every class in turn. With text the speaker.
            ema: averaged weights (true), raw ones (false), or the average with one decay.
            inpaint: a picture file, or the number of a test item, of which a part is kept and the rest drawn.
            mask: a picture file for inpaint, white where the item is kept, black where it is drawn; for mels and text
                as in `genmodels sample`. With `text` in its place the words in which a text differs are drawn.
            edit: a picture file, or the number of a test item, to which noise is added and removed again.
            batch_size: samples per batch.
            progress: show a progress bar.
            options: those of `genmodels.core.samples.SamplingOptions`: seed, steps, sampler, guidance, temperature,
                text, ...; with text also pause and vocoder.

        Raises:
            InputError: for options that this model does not take, or values that make no sense.
        """
        options = {key: value for key, value in {"cond": cond, **options}.items() if value is not None}
        self.network.require_options(options, () if self.spec.text is None else ("pause", "vocoder"))
        usual = DEFAULT_NUMBER if self.spec.text is None else 1
        options = _checked("genmodels.core.samples.SamplingOptions", options | {"n": usual if n is None else n})
        at_least(1, n=options["n"], batch_size=batch_size)
        named = {"inpaint": inpaint, "mask": mask, "edit": edit}
        require_partners(options | named)
        if "weights" in options or (inpaint is not None and options.keys() & {"known", "keep"}):
            raise InputError("weights are chosen by ema=, and known and keep by inpaint= and mask=: leave them out")
        of_text = {} if self.spec.text is None else options
        items, _ = material(self.network, self.header, of_text | named, self.ckpt, self.trust, weights_of(ema))
        options |= items | {"weights": weights_of(ema)}
        if self.spec.text is not None:
            return self._say(options.pop("n"), options)
        drawn = draw(self.network, SamplingOptions(**options), batch_size=batch_size, progress=progress)
        drawn.made |= self._source.record_of(self.network)
        return Samples.of(drawn, self.spec)

    def _say(self, takes: int, options: dict[str, Any]) -> Speech:
        from genmodels.cli.say import Speech, examples_of, synthesis_options, synthesise

        how = synthesis_options(self.network, options)
        texts = examples_of(self.spec, takes) if how.text is None else how.text
        found = synthesise(self.network, [texts] if isinstance(texts, str) else list(texts), how,
                           takes=1 if how.text is None else takes, start=how.start)
        return Speech(found, self.spec, how, self._source.record_of(self.network))

    def log_likelihood(
        self, x: Any, cond: Any = None, *, ema: bool | float = True, seed: int = 0,
        batch_size: int | None = None, **options: Any,
    ) -> Likelihood:
        """The log-likelihood of items, with its kind and its error: exact, a bound, an ODE's, ...

        Arguments:
            x: a Batch as `items` returns it, or (n, *event) in the data's own units.
            cond: the class of each, for a model that is conditioned on it.
            ema: averaged weights (true), raw ones (false), or the average with one decay.
            seed: seed of the noise, which is keyed by item.
            batch_size: items per batch; None for as many as `genmodels evaluate` takes.
            options: those of the family's `log_likelihood`: draws, bound, importance_samples, ...

        Raises:
            InputError: for items that are not such data, or an option that the family does not have.
        """
        known = inspect.signature(self.network.log_likelihood).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
            own = [name for name in known if name not in ("batch", "weights", "seed")]
            require_known(f"the likelihood of {an(self.family)}", options, own)
        from genmodels.evaluation.checkpoint import Request

        batch, rows = self._batch(x, cond), Request.batch_size if batch_size is None else batch_size
        with as_input_errors():
            at_least(1, items=len(batch), batch_size=rows)
            at_least(0, seed=seed)
            self.spec.check(batch)
            how = {"weights": weights_of(ema), "seed": seed, **options}
            parts = [self.network.log_likelihood(batch.rows(slice(k, k + rows)).to(self.network.device), **how).cpu()
                     for k in range(0, len(batch), rows)]
            return Likelihood.concatenate(parts)

    def _batch(self, x: Any, cond: Any) -> Batch:
        try:
            own = x if isinstance(x, Batch) else Batch(torch.as_tensor(x))
            number = torch.arange(len(own))
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"items are a Batch or an array, got {type(x).__name__}: {first_line(error)}") from error
        if cond is not None and not isinstance(cond, TextCondition):
            if not isinstance(cond, str) and (shape := np.shape(cond)) and shape[0] != len(own):
                raise InputError(f"cond has {shape[0]} classes for {len(own)} items: give one each, or one for all")
            with as_input_errors():
                cond = self.network.labels(cond, number).cpu()
        whole = not (self.spec.levels or own.x.is_floating_point() or own.x.is_complex())
        values = own.x.to(torch.get_default_dtype()) if whole else own.x
        return Batch(values, own.cond if cond is None else cond, own.mask, number if own.index is None else own.index)

    def transcribe(
        self, files: str | Path | Sequence[str | Path], *, ema: bool | float = True, **options: Any
    ) -> list[Transcript]:
        """Transcribe recordings by a recogniser: each `Transcript` has file, text, score and words.

        Arguments:
            files: one recording (.wav) or several.
            ema: averaged weights (true), raw ones (false), or the average with one decay.
            options: those of `genmodels.cli.transcribe.TranscriptionOptions`: beam, nbest, lm, times, ...; with nbest=3
                there are three for each file, the most probable first.

        Raises:
            InputError: for a model that is no recogniser, a file that cannot be read, or wrong options.
        """
        from genmodels.cli.transcribe import TranscriptionOptions, heard, recordings

        require_known("transcribe", options, [field.name for field in fields(TranscriptionOptions)])
        names = [str(files)] if isinstance(files, str | Path) else [str(file) for file in files]
        mels = recordings(self.network, self.header, names)
        how = TranscriptionOptions(**_checked("genmodels.cli.transcribe.TranscriptionOptions", options))
        return list(heard(self.network, mels, how, weights_of(ema), self.trust))

    def verify(self, *, ema: bool | float = True, device: str = "cpu", **options: Any) -> Findings:
        """The checks of `genmodels verify ckpt=...`: `passed`, `failed`, and as text the tables that it prints.

        Arguments:
            ema: averaged weights (true), raw ones (false), or the average with one decay.
            device: auto, cpu, cuda, ...
            options: those of `genmodels.verification.check.Options`: max_dims, patience, compiler, seed, progress.

        Raises:
            InputError, RunError: for options that make no sense, or missing data.
        """
        from genmodels.cli.verify import check_model
        from genmodels.verification.check import Options

        require_known("verify", options, [field.name for field in fields(Options) if field.name != "randomise"])
        how = Options(**_checked("genmodels.verification.check.Options", {"randomise": False, **options}))
        return check_model(None, None, self._source.file_of(self.network), ema, device, self.trust, how)

    def push(
        self, to: str | None = None, *, licence: str, out: str | Path | None = None, private: bool = False
    ) -> None:
        """Publish the model on the Hugging Face hub, or write the files to the folder `out`.

        Raises:
            InputError, RunError: as `genmodels push` says.
        """
        from genmodels.cli import push

        ckpt = self._source.file_of(self.network)
        push.run(ckpt=ckpt, licence=licence, to=to, out=out and str(out), private=private, trust=self.trust)

    def export(self, out: str | Path, *, ema: bool | float = True) -> list[str]:
        """Write the model to a .safetensors, or its network to a .onnx or .pt2; returns lines on files and checks.

        Raises:
            InputError, RunError: as `genmodels export` says.
        """
        from genmodels.cli.export import export

        return export(self.network, self._source.header_of(self.network), out, ema, self.trust)

    def evaluate(self, **options: Any) -> Comparison:
        """`genmodels.evaluate` of this model."""
        return evaluate(self, **options)

    def __repr__(self) -> str:
        return f"{self.family} of {self.spec.name} {self.spec.event_shape}, {self._size}, from {self.ckpt}"

    @property
    def _size(self) -> str:
        return f"{sum(p.numel() for p in self.network.core.parameters()):,} parameters"

    def _repr_html_(self) -> str:
        spec = self.spec
        kind = "continuous" if spec.levels is None else f"{spec.levels} levels"
        return html_table(self.family, {
            "data": f"{spec.name}, {' x '.join(map(str, spec.event_shape))}, {kind}", "classes": spec.num_classes,
            "network": self._size, "steps": f"{self.header['step']:,}",
            **{name: f"{value:.4f}" for name, value in self.header["figures"].items()}, "file": self.ckpt})


def load(ckpt: str | Path, *, device: str = "auto", trust: Sequence[str] = ()) -> Model:
    """A trained model.

    Arguments:
        ckpt: a run folder (its best.ckpt), a checkpoint, an exported .safetensors, or hf://user/name.
        device: auto, cpu, cuda, ...
        trust: further packages whose classes the checkpoint may name.

    Raises:
        InputError: for a class of another package, a device that is not there, or a name that the hub does not have.
        RunError: for a file that is missing, damaged, or no checkpoint.

    Example:
        >>> load("runs/nothing")
        Traceback (most recent call last):
        ...
        genmodels.core.errors.RunError: runs/nothing: no such checkpoint...
    """
    network, header = load_model(located(ckpt), device=device, trust=trust)
    return Model(network, header, ckpt, trust)


def evaluate(ckpt: str | Path | Model | Sequence[str | Path | Model], **options: Any) -> Comparison:
    """Evaluate and compare models as `genmodels evaluate` does: likelihoods, sample quality, checks, cost.

    Arguments:
        ckpt: a model or what `load` takes, or a list of them.
        options: those of `genmodels.evaluation.checkpoint.Request`: split, limit, stages, draws, samples, out, ...

    Raises:
        InputError: for options that make no sense, or models of other data.
        RunError: when nothing could be evaluated; failures of some of several models are in `failed`.

    Example:
        >>> evaluate("runs/a", limits=3)
        Traceback (most recent call last):
        ...
        genmodels.core.errors.InputError: evaluate has no option 'limits': did you mean 'limit'?
    """
    from genmodels.cli import evaluate as command
    from genmodels.evaluation.checkpoint import Request

    require_known("evaluate", options, [field.name for field in fields(Request)])
    several = list(ckpt) if isinstance(ckpt, Iterable) and not isinstance(ckpt, str) else [ckpt]
    names = [each._source.file_of(each.network) if isinstance(each, Model) else each for each in several]
    trusted = [name for each in several if isinstance(each, Model) for name in each.trust]
    options["trust"] = list(dict.fromkeys([*(options.get("trust") or ()), *trusted]))
    if options.get("processes", 1) != 1:
        raise InputError("processes is for the command: genmodels evaluate processes=2 ...")
    request = Request(**_checked("genmodels.evaluation.checkpoint.Request", options))
    with _interruptible():
        return command.evaluate(*command.asked(names, request))


def train(model: str | None = None, *words: str, device: str = "auto", **settings: Any) -> Model:
    """Train a model as `genmodels train` does, and load its best checkpoint.

    Arguments:
        model: ddpm, glow, nsf, energy, ...; as on the command line ddpm by default.
        words: further settings as on the command line: "model.net.channels=16".
        device: where the trained model is loaded.
        settings: settings by name: data="toy", seed=1, run_dir="runs/a", trainer={"max_steps": 100}. A name alone
            stands for the setting of that name of the trainer, the data or the model: max_steps=100, batch_size=32,
            lr=1e-3.

    Raises:
        InputError: for unknown or ambiguous settings and wrong values.
        RunError: for training that fails, such as by a loss that is not finite.

    Example:
        >>> train("ddpm", data="toy", max_stepps=10)
        Traceback (most recent call last):
        ...
        genmodels.core.errors.InputError: train has no option 'max_stepps': did you mean 'max_steps'?
    """
    from genmodels.cli import train as command
    from genmodels.cli.compose import composer, words_by_name
    from genmodels.training.processes import training_of_a_script

    with composer("train") as hydra:
        hydra.given = "in Python"
        chosen = ([] if model is None else [f"model={model}"]) + list(words)
        config = hydra.compose(words_by_name(hydra, chosen, settings))
    with _interruptible(), training_of_a_script(), torch.random.fork_rng(devices=[]):  # a run seeds it for its weights
        folder = command.run(**config).run
    best = Path(folder) / "best.ckpt"
    return load(best if best.is_file() else best.with_name("last.ckpt"), device=device, trust=config.get("trust") or ())


def _checked(taker: str, given: dict[str, Any]) -> dict[str, Any]:
    """Options checked and converted as on the command line; tensors of items, and of numbers of classes, stay."""
    schema = Schema(taker, lambda _: "in Python")
    plain = {key: _plain(value) for key, value in given.items() if key in schema.top.keys and key != "cond"}
    return given | {k: torch.as_tensor(v) for k, v in given.items() if isinstance(v, np.ndarray)} | schema.check(plain)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value.tolist() if hasattr(value, "tolist") else value


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C stops a command where it is safe, and is a KeyboardInterrupt for the caller."""
    from genmodels.training.processes import stoppable

    try:
        with stoppable():
            yield
    except Interrupted as error:
        raise KeyboardInterrupt(str(error)) from None
