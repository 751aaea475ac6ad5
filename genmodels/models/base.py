"""The base class of every family: the contract, and Lightning's hooks written once."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from PIL import Image
from torch import Tensor, nn

from genmodels import __version__
from genmodels.core.checkpoint import name_former
from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, RunError, an, require_known
from genmodels.core.likelihood import Likelihood, breakdown
from genmodels.core.processes import averaged, gather, rank_world, set_whole, shard, whole
from genmodels.core.random import KeyedGenerator, reseed, seed_of
from genmodels.core.samples import COMMON, Samples, SamplingOptions
from genmodels.core.tensors import event_size
from genmodels.data.base import DataModule, OfLightning
from genmodels.models.build import construct, options_given
from genmodels.models.optimizer import EMA, Optimizer, explain_failure, explain_nonfinite


@dataclass
class Loss:
    """The training loss: `value ()`, `per_example (B,)`, and named `parts (B,)` for the log.

    `times (B,)` are the noise levels, if the family has them, for the report of a non-finite loss.
    """

    value: Tensor
    per_example: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    times: Tensor | None = None


class GenerativeModel(OfLightning, nn.Module):
    """A generative model of one family, with training, likelihood and sampling under one contract.

    A subclass sets `self.core` (the nn.Module that holds everything learned), calls `self.finish_setup(...)`, and
    defines `loss`, `log_likelihood` and `sample`. Randomness is keyed by (seed, step, position), never global. Batches
    are in the data's own units; preprocessing and its volume change belong to the model. A model is a LightningModule
    once Lightning is imported, as in training; sampling does not wait for that import.

    Arguments:
        spec: the data set this model is built for.
    """

    _lightning = "LightningModule"
    family = "model"
    #: Whether `trainer.compile=true` may compute float32 products in TF32; not if an inverse has to undo them.
    tolerates_tf32 = True
    #: Whether it is conditioned on texts; other models refuse data with texts.
    takes_text = False
    #: Whether it can start from items of another data set instead of noise (`data=transport`); others refuse such data.
    takes_source = False
    #: Whether it generates samples of its data; a model that does not has `transcripts` to show during training.
    generates = True
    #: Whether `ode_likelihood` gives its likelihood by the probability-flow ODE.
    has_ode_likelihood = False
    conditional = False  # on the class, see `condition_on_class`
    cond_drop = 0.0  # the probability that training hides the class
    #: The fields of `SamplingOptions` that it takes besides those that every model takes.
    sampling_options: tuple[str, ...] = ()
    #: The allowed values of its option `sampler`; empty if any are.
    samplers: tuple[str, ...] = ()
    default_temperature = 1.0  # of samples
    #: Why `trainer.strategy=fsdp` cannot shard its weights over the processes; see `sharded_networks`.
    needs_whole_weights = "its weights are also used outside of the networks that hold them"
    core: nn.Module
    _trainer = None  # Lightning's

    def __init__(self, spec: DataSpec):
        super().__init__()
        self._hparams: dict = {}
        spec.require(self.family, text=self.takes_text, source=self.takes_source)
        self.spec = spec
        self.seed = self.batches_seen = 0  # `batches_seen` counts micro-batches of the run, the same on all processes
        self.figures: dict[str, float] = {}
        self.run_config: dict = {}
        self.decided: dict = {}
        self.finished = False
        self.validated: Likelihood | None = None  # of all items of the last validation
        self._pending: list[Likelihood] = []
        self.latest: list[tuple[Batch, Loss]] = []  # the micro-batches of the last step

    @property
    def hparams(self) -> dict:
        """The options of the constructor, by name."""
        return self._hparams

    def save_hyperparameters(self, **_) -> None:
        """Keep the options of a subclass; called in its constructor, like Lightning's method of this name."""
        self._hparams |= options_given(self, inspect.currentframe().f_back)

    @property
    def device(self) -> torch.device:
        """The device of the weights; the CPU for a model without weights."""
        return next((weight.device for weight in self.parameters()), torch.device("cpu"))

    def decide(self, **options) -> None:
        """Record options whose defaults depend on the data or on other options; called in a subclass' constructor.

        They are saved with a run, which so stays the same when a later version has other defaults.
        """
        self.decided |= options
        self.hparams.update(options)

    def finish_setup(self, optimizer: Optimizer | dict | None, ema_decay: float | list[float]) -> None:
        """Set up the optimiser's options and the averages of `core`; called last in a subclass' constructor."""
        given = isinstance(optimizer, Optimizer)
        self.optimizer_options = optimizer if given else construct(Optimizer, **(optimizer or {}))
        decays = ema_decay if isinstance(ema_decay, list | tuple) else [ema_decay]
        self.ema = EMA(self.core, list(decays)) if any(decays) else None

    # ---- the contract -------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """The training objective on a batch."""
        raise NotImplementedError

    def log_likelihood(self, batch: Batch, *, weights: str | float = "ema", seed: int = 0, **options) -> Likelihood:
        """Log-likelihood of each example in nats, of the data in its own units.

        Arguments:
            batch: items in the data's own units.
            weights: `ema`, `raw`, or one of the decays kept.
            seed: seed of all noise, which is keyed by (seed, item), so that it is the same in every batch.
        """
        raise NotImplementedError

    def sample(
        self, n: int = 1, cond: int | str | list[int | str] | None = None, temperature: float | None = None,
        seed: int = 0, **options,
    ) -> Samples:
        """Samples number `start` .. `start + n - 1` of a seed, each of them the same whatever n is.

        Arguments:
            n: how many.
            cond: class, classes (cycled), or None for every class in turn; for texts the speaker.
            temperature: factor on the standard deviation of all noise; None for `default_temperature`.
            seed: sample k of a seed depends on (seed, k) alone.
            options: `start`, `weights`, and those of `SamplingOptions` that this model's `sampling_options` name.

        Raises:
            InputError: for an option that this model does not take, or a value that it refuses.
        """
        self.require_options(options)
        request = SamplingOptions(n=n, cond=cond, temperature=temperature, seed=seed, **options)
        request.require_levels(self.spec.levels)
        return self.draw(request.with_default(temperature=self.default_temperature if request.known is None else 1.0))

    def draw(self, options: SamplingOptions) -> Samples:
        """The samples that `sample` returns, for options that it has checked; defined by a family."""
        raise NotImplementedError

    @classmethod
    def own_options(cls) -> list[str]:
        """The names of the sampling options, without `n`, `start` and `weights`, which every model takes."""
        if cls.sample is GenerativeModel.sample:
            return ["cond", "temperature", "seed", *cls.sampling_options]
        every = ("self", "n", "start", "weights")
        return [name for name in inspect.signature(cls.sample).parameters if name not in every]

    @classmethod
    def takes(cls, option: str) -> bool:
        """Whether `sample` takes an option, by its name or, if a subclass overrides `sample`, by `**options`."""
        if cls.sample is GenerativeModel.sample:
            return option in COMMON or option in cls.sampling_options
        known = inspect.signature(cls.sample).parameters
        return option in known or any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())

    @classmethod
    def require_options(cls, given: Iterable[str], further: Sequence[str] = ()) -> None:
        """Raise InputError for the first option that `sample` does not take and that is none of the `further` ones."""
        wrong = [key for key in given if not cls.takes(key)]
        require_known(cls.family, wrong, [*cls.own_options(), *further], "sampling option")

    def initialize(self, batch: Batch) -> None:
        """Data-dependent initialisation on a large batch of training data, once, before the first step."""

    def check_items(self, data: DataModule) -> None:
        """Raise InputError for items that the model cannot learn from, before the first step."""

    @torch.no_grad()
    def start_from(self, other: GenerativeModel) -> None:
        """Copy the averaged weights of a trained model, into the averages too, but not the statistics of its data.

        Raises:
            InputError: for a model of another class, of other sizes, or of texts in other symbols.
        """
        if type(other) is not type(self):
            raise InputError(f"it holds {an(other.family)}, and this is {an(self.family)}")
        if self.spec.text is not None and self.spec.text["symbols"] != other.spec.text["symbols"]:
            raise InputError("its texts have other symbols: give the options of its data")
        # What is left out: memory=inverse finds anew which layers store their inputs.
        theirs, own = ({name: value for name, value in core.state_dict().items() if not name.endswith("gauge.switched")}
                       for core in (other.weights(), self.core))
        theirs |= {f"{place}.{name}": own[f"{place}.{name}"] for place, part in self.core.named_modules()
                   for name in getattr(part, "of_data", ())}
        for name in {**own, **theirs}:
            there, here = (tuple(some[name].shape) if name in some else "absent" for some in (theirs, own))
            if there != here:
                raise InputError(f"{name} has shape {there} there and {here} here: give the options of that model")
        for core in self.cores():
            core.load_state_dict(theirs)

    def cores(self) -> list[nn.Module]:
        """The core and its averages."""
        return [self.core, *(() if self.ema is None else self.ema.averages)]

    def compiled_parts(self) -> list[nn.Module]:
        """The modules that `trainer.compile=true` compiles: the network, or the whole core."""
        return [getattr(self.core, "net", self.core)]

    def sharded_networks(self) -> list[nn.Module]:
        """The networks, holding all weights, that `trainer.strategy=fsdp` shards over the processes."""
        raise InputError(f"trainer.strategy=fsdp is for models that call their networks whole, not for {self.family}: "
                         f"{self.needs_whole_weights}; use trainer.strategy=ddp")

    def validation_options(self) -> dict:
        """Options of `log_likelihood` that make it cheap enough for training: eight draws where it takes `draws`."""
        takes = hasattr(self, "num_steps") and "draws" in inspect.signature(self.log_likelihood).parameters
        return {"draws": min(8, self.num_steps - 1)} if takes else {}

    def pictures(self) -> dict[str, Image.Image]:
        """Further pictures of this model by name, drawn during training whenever samples are."""
        return {}

    def weights(self, which: str | float = "ema") -> nn.Module:
        """The core with averaged (`ema`, or one decay) or `raw` weights."""
        if which == "raw" or (which == "ema" and self.ema is None):
            return self.core
        if self.ema is None:
            raise InputError("this model keeps no averaged weights: leave weights= (on the command line ema=) out")
        try:
            decay = None if which == "ema" else float(which)
        except (TypeError, ValueError):
            raise InputError(f"weights={which!r} is not ema, raw or a decay") from None
        return self.ema.average(decay)

    def labels(self, cond, index: Tensor) -> Tensor | None:
        """Class labels for samples: given ones cycled over the indices, or every class in turn.

        Raises:
            InputError: when a class is out of range, or the model takes no classes.
        """
        if self.num_classes is None:
            if cond is not None:
                raise InputError("this model is unconditional: leave cond out")
            return None
        wanted = torch.tensor(self.spec.classes_named(cond), device=self.device)
        return wanted[index.to(self.device) % len(wanted)]

    @property
    def modelled(self) -> DataSpec:
        """The data whose likelihood it has; for a recogniser the texts."""
        return self.spec

    @property
    def num_classes(self) -> int | None:
        """Number of classes the model is conditioned on, None for an unconditional one."""
        return self.spec.num_classes if self.conditional else None

    def _given(self, batch: Batch, weights: str | float) -> dict:
        """Entries of `Likelihood.made`: the weights, and whether the classes were given."""
        of_class = self.conditional and batch.cond is not None
        return {"weights": str(weights)} | ({"given": "class"} if of_class else {})

    def _cond(self, batch: Batch) -> Tensor | None:
        self.require_class(batch.cond)
        return batch.cond if self.conditional else None

    def require_class(self, cond: object) -> None:
        """Raise InputError for no class where training always gave it, or outside training for labels of no class."""
        if cond is None and self.conditional and not self.has_null_class:
            raise InputError("this model was trained with cond_drop=0 and always needs a class: give cond")
        if isinstance(cond, Tensor) and self.conditional and not self.training:  # data modules check training data
            for wrong in cond[(cond < 0) | (cond >= self.num_classes + self.has_null_class)]:
                self.spec.classes_named(wrong)

    def condition_on_class(self, wanted: bool, cond_drop: float = 0.0) -> None:
        """Condition on classes, if any, hidden in training with probability `cond_drop`, which must be in [0, 1)."""
        if not 0 <= cond_drop < 1:
            raise ValueError(f"cond_drop must be from 0 to below 1, got {cond_drop}")
        self.conditional, self.cond_drop = wanted and self.spec.num_classes is not None, cond_drop

    @property
    def has_null_class(self) -> bool:
        """Whether training hides the class at random, so that the model can also be used without a class."""
        return self.conditional and self.cond_drop > 0

    def _hidden(self, cond: Tensor | None, generator: KeyedGenerator) -> Tensor | None:
        """The classes, each replaced by the null class with probability `cond_drop` (Ho and Salimans 2022)."""
        if cond is None or not self.cond_drop:
            return cond
        hidden = generator.child("condition").uniform((len(cond),), device=cond.device) < self.cond_drop
        return torch.where(hidden, self.num_classes, cond)

    def no_likelihood(self, batch: Batch, reason: str, weights: str | float) -> Likelihood:
        """The result of a model without a likelihood: NaN for each item, and the reason."""
        nats = torch.full((len(batch),), float("nan"), dtype=torch.float64, device=batch.x.device)
        made = {"estimate": "none", "reason": reason, "weights": str(weights)}
        return Likelihood(nats, "unnormalised", event_size(batch.x, batch.mask).long(), self.spec.levels, None, made,
                          batch.item_index)

    def numbered(self, n: int, start: int) -> Tensor:
        """The numbers `start` .. `start + n - 1` of samples, (n,) int64; InputError for none, or one below 0."""
        SamplingOptions(n=n, start=start)
        return torch.arange(start, start + n, device=self.device)

    # ---- Lightning's hooks --------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """With `trainer.strategy=fsdp` shard weights, averages and the optimiser's state over the processes."""
        if self._device_mesh is not None:
            shard(self.core, self.cores()[1:], self.sharded_networks(), self._device_mesh["data_parallel"])

    def on_validation_start(self) -> None:
        """Gather sharded averages during validation, in which processes have different numbers of batches."""
        set_whole(self.weights("ema"), True)

    def on_validation_end(self) -> None:
        """Shard the averages again."""
        set_whole(self.weights("ema"), False)

    def training_generator(self, n: int) -> KeyedGenerator:
        """The noise of this step: keyed by (seed, step, position in the global batch)."""
        rank, world = rank_world()
        position = torch.arange(n, device=self.device) * world + rank
        return KeyedGenerator(self.seed, position, "train", step=self.batches_seen)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One micro-batch: the loss under keyed noise; dropout is reseeded by a key at every step."""
        reseed(seed_of(self.seed, "dropout", self.batches_seen), self.device)
        try:
            loss = self.loss(batch, self.training_generator(len(batch)))
        except torch.linalg.LinAlgError as error:
            raise RunError(explain_failure(self, error)) from error
        self.batches_seen += 1
        parts = {name: part.detach() for name, part in loss.parts.items()}
        kept = Loss(loss.value.detach(), loss.per_example.detach(), parts, loss.times)
        self.latest = [*self.latest, (batch, kept)][-self.trainer.accumulate_grad_batches :]
        named = {"train/loss": kept.value} | {f"train/{k}": v.mean() for k, v in parts.items()}
        # One collective for all values; `sync_dist` takes two for each.
        values = averaged(torch.stack([value.to(loss.value.dtype) for value in named.values()]))
        self.log_dict(dict(zip(named, values, strict=True)), batch_size=len(batch))
        return loss.value

    def on_before_optimizer_step(self, optimizer) -> None:
        """Clip the gradient; stop before a non-finite one reaches the weights."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = whole(torch.nn.utils.clip_grad_norm_(parameters, self.optimizer_options.clip or float("inf")))
        if not torch.isfinite(norm):
            raise RunError(explain_nonfinite(self, self.latest))
        self.log("train/gradient_norm", norm)
        self.log("train/learning_rate", optimizer.param_groups[0]["lr"])

    def optimizer_step(self, *args, **kwargs) -> None:
        """The optimiser's step, then an update of the averages."""
        super().optimizer_step(*args, **kwargs)
        if self.ema is not None:
            self.ema.update(self.core, self.trainer.global_step)  # which does not count this step yet

    def configure_optimizers(self):
        """Optimiser and schedule for the steps of this run."""
        total = self.trainer.max_steps if self.trainer.max_steps > 0 else self.trainer.estimated_stepping_batches
        optimizer, scheduler = self.optimizer_options.build(self.core.parameters(), int(total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Set the learning rate for the length of this run, which may have changed since a checkpoint was written."""
        scheduler = self.lr_schedulers()  # that of Lightning's learning-rate finder has no `lr_lambdas`
        for number, factor in enumerate(getattr(scheduler, "lr_lambdas", ())):
            scheduler.optimizer.param_groups[number]["lr"] = scheduler.base_lrs[number] * factor(scheduler.last_epoch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The likelihood of a validation batch under the averaged weights, keyed by item."""
        self._pending.append(self.log_likelihood(batch, seed=self.seed, **self.validation_options()).cpu())

    def on_validation_epoch_end(self) -> None:
        """Gather the batches of all processes, and log their likelihood."""
        pending, self._pending = gather(self._pending), []
        self.log_validation(Likelihood.concatenate(pending))

    def log_validation(self, result: Likelihood) -> None:
        """Log bits/dim, or for continuous data nats (of sequences per dimension), then the parts of a bound."""
        spec = self.modelled
        if spec.mel is not None:
            name, value = "val/nll_per_dim", result.mean_nll_per_dim()
        elif result.levels is None:
            name, value = "val/nll", None if (mean := result.mean_nats()) is None else -mean
        else:
            name, value = f"val/{spec.unit}", result.mean_bits_per_dim()
        self.log(name, float("nan") if value is None else value, rank_zero_only=False)
        for part, share in breakdown(result, spec.mel is not None).items():
            self.log(part, share, rank_zero_only=False)
        if value is not None:
            self.figures[name] = value
        self.validated = result

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def header(self) -> dict:
        """The header of a checkpoint: plain types, readable without torch."""
        described = {
            "format": 1,
            "family": self.family,
            "genmodels": __version__,
            "torch": torch.__version__,
            "model": {"_target_": f"{type(self).__module__}.{type(self).__qualname__}", **self.options},
            "config": self.run_config,
            "data": self.spec.to_dict(),
            "parameters": sum(p.numel() for p in self.core.parameters()),
            "step": self._trainer.global_step if self._trainer is not None else 0,
            "batches_seen": self.batches_seen,
            "seed": self.seed,
            "figures": dict(self.figures), "finished": self.finished,
        }  # fmt: skip
        try:
            return name_former(json.loads(json.dumps(described)), "data")
        except TypeError as error:
            raise RunError(f"this {self.family} was built from objects, which a checkpoint does not hold: build it "
                           f"from plain options ({error})") from error

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """The header, and the counters that exact resume needs."""
        checkpoint["genmodels"] = self.header()

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """The inverse of `on_save_checkpoint`."""
        header = checkpoint["genmodels"]
        parameters = list(self.core.parameters())
        for number, kept in checkpoint["optimizer_states"][0]["state"].items():
            for value in kept.values():
                if isinstance(value, Tensor) and value.dim() and value.shape != parameters[number].shape:
                    was, now = tuple(value.shape), tuple(parameters[number].shape)
                    raise RunError(f"the optimiser's state of weight {number} has shape {was}, the weight {now}: no "
                                   "run can go on from this checkpoint")
        self.batches_seen, self.seed = header["batches_seen"], header["seed"]
        self.figures, self.finished = dict(header["figures"]), header["finished"]

    @property
    def options(self) -> dict:
        """The keyword options this model was built with, defaults included."""
        return {key: value for key, value in self.hparams.items() if key != "spec"}
