"""A sweep whose points Optuna chooses; `hydra/sweeper=optuna` selects it, any of Hydra's launchers runs the points."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from genmodels.core.errors import InputError, first_line

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


class OptunaSweeper(Sweeper):
    """Minimise what the command returns as a number, over the settings that the command line gives several values.

    `interval(a,b)` is searched between its ends, on a logarithmic scale as `tag(log,interval(a,b))`, by integers as
    `int(interval(a,b))`; `range(...)` and `a,b,c` among their values. The study is stored in optuna.journal of the
    sweep's folder: a resumed sweep runs interrupted and failed points again, then the missing ones. Hydra's own
    plugin is bound to Optuna 2, whose storages no longer work.

    Arguments:
        n_trials: number of points.
        n_jobs: number of points chosen at a time, which the launcher may run in parallel.
        sampler: class and options of a sampler of Optuna; its seed makes the choice reproducible.
        params: further settings with their values.

    Raises:
        InputError: if Optuna is not installed, or a number of points is not positive.

    Source: T. Akiba et al., Optuna: a next-generation hyperparameter optimization framework, KDD 2019.
    """

    def __init__(self, n_trials: int, n_jobs: int, sampler: DictConfig, params: DictConfig | None = None):
        for name, value in (("n_trials", n_trials), ("n_jobs", n_jobs)):
            if not isinstance(value, int) or value < 1:
                raise InputError(f"hydra.sweeper.{name} must be a positive integer, got {value!r}")
        self.n_trials, self.n_jobs, self.sampler, self.params = n_trials, n_jobs, sampler, dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra: the launcher and the folder."""
        self.config, self.loader = config, hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        """Choose points, launch them and report their values to Optuna, until there are `n_trials`."""
        words = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        given = {o.get_key_element(): o for o in OverridesParser.create(self.loader).parse_overrides(words)}
        fixed = [f"{key}={o.get_value_element_as_str()}" for key, o in given.items() if not o.is_sweep_override()]
        if importlib.util.find_spec("optuna") is None:
            raise InputError("hydra/sweeper=optuna needs Optuna: pip install 'genmodels[scale]'")
        space = {}
        for key, override in given.items():
            try:
                space |= {key: _distribution(override)} if override.is_sweep_override() else {}
            except ValueError as error:
                raise InputError(f"{override.input_line.lstrip('+')}: {first_line(error)}") from error
        if not space:
            raise InputError("hydra/sweeper=optuna: nothing to search: give a setting several values, as in "
                             "\"model.optimizer.lr=tag(log,interval(1e-4,1e-2))\"")
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        study, complete = self._study(folder, space)
        OmegaConf.save(self.config, folder / "multirun.yaml")

        def launch(trials: list, number: int) -> Sequence[JobReturn]:
            points = [[*fixed, *(f"{key}={value}" for key, value in trial.params.items())] for trial in trials]
            return self.launcher.launch(points, initial_job_idx=number)

        launch(complete, 0)  # not run again, but listed in the summary
        done = len(complete)
        while done < self.n_trials:
            trials = [study.ask(space) for _ in range(min(self.n_trials - done, self.n_jobs))]
            for trial, job in zip(trials, launch(trials, done), strict=True):
                _tell(study, trial.number, job.return_value)
            done += len(trials)

    def _study(self, folder: Path, space: dict[str, BaseDistribution]) -> tuple[Study, list[FrozenTrial]]:
        """The study of a folder, and its complete trials; unfinished ones are queued first.

        Raises:
            InputError: for other values of a setting than the study has, where Optuna cannot change them.
        """
        import optuna
        from optuna.distributions import check_distribution_compatibility
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
        from optuna.trial import TrialState

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = JournalStorage(JournalFileBackend(str(folder / "optuna.journal")))
        study = optuna.create_study(storage=storage, study_name="sweep", load_if_exists=True)
        before = study.get_trials()
        for key, then in {key: then for trial in before for key, then in trial.distributions.items()}.items():
            try:
                check_distribution_compatibility(then, space.get(key, then))
            except ValueError:
                raise InputError(f"{key}: the search in {folder} has other values ({then}), and Optuna can change the "
                                 "ends of an interval alone: give the same again, or begin a new search") from None
        seed = self.sampler.get("seed")
        # With the same seed, a resumed sampler would repeat the first points.
        study.sampler = instantiate(self.sampler, **({} if seed is None else {"seed": seed + len(before)}))
        complete = [trial for trial in before if trial.state == TrialState.COMPLETE]
        waiting = [trial.system_attrs["fixed_params"] for trial in before if trial.state == TrialState.WAITING]
        settled = [*(trial.params for trial in complete), *waiting]
        for trial in before:
            if trial.state == TrialState.RUNNING:
                study.tell(trial.number, state=TrialState.FAIL)
            if trial.state in (TrialState.RUNNING, TrialState.FAIL) and trial.params not in settled:
                study.enqueue_trial(trial.params)
                settled.append(trial.params)
        return study, complete


def _tell(study: Study, number: int, found: Any) -> None:
    """Report the value of a point to a study, or that it failed."""
    from optuna.trial import TrialState

    try:
        value = float(found)
    except (TypeError, ValueError):
        value = math.nan
    if math.isfinite(value):
        study.tell(number, value)
    else:
        study.tell(number, state=TrialState.FAIL)


def _distribution(override: Override) -> BaseDistribution:
    """The values of a setting, as Optuna describes them."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if isinstance(value, IntervalSweep):
        kind = IntDistribution if isinstance(value.start, int) else FloatDistribution
        return kind(value.start, value.end, log="log" in value.tags)
    if isinstance(value, RangeSweep):
        values = list(override.sweep_iterator())
        if all(isinstance(each, int) for each in values):
            return IntDistribution(min(values), max(values), step=abs(value.step))
        # Optuna leaves out an end that is no whole number of steps away, as 0.8999999999999999 in steps of 0.3.
        start, step = Decimal(str(value.start)), Decimal(str(value.step))
        return FloatDistribution(*sorted((float(start), float(start + (len(values) - 1) * step))), step=abs(value.step))
    return CategoricalDistribution(tuple(override.sweep_string_iterator()))
