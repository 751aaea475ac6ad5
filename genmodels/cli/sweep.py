"""A sweep: every point checked before the first starts, then run by Hydra's sweepers and launchers.

The points of `train` have their run folders inside the folder of the sweep; result.json in each holds the outcome of a
finished point. A resumed sweep, and a job that a cluster starts again, therefore repeat nothing.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from genmodels.cli.compose import Composer
from genmodels.cli.schema import Schema
from genmodels.core.errors import InputError, RunError, explain
from genmodels.core.files import HUB, in_hydra, new_folder, place_of, short_hash, write_text, write_whole
from genmodels.verification.check import table

_LONGEST = 80  # characters of a point's folder name
_SET_BY_US = ("hydra.mode=", "hydra.sweep.dir=")


@dataclass(frozen=True)
class Failure:
    """The result of a failed point, so that the following points still run."""

    message: str


@dataclass(frozen=True)
class Point:
    """The task that Hydra calls for each point; a plain value, so that any launcher can pickle it.

    Arguments:
        command: the command that is swept.
        swept: the keys that distinguish the points.
        folder: the folder of the sweep.
        program: the beginning of the command line that runs a single point.
    """

    command: str
    swept: tuple[str, ...]
    folder: str
    program: tuple[str, ...]

    def __call__(self, config: DictConfig):
        words = list(HydraConfig.get().overrides.task)
        plain = OmegaConf.to_container(config, resolve=True)
        print(f"\n--- {self.command} {self.title(words)}", flush=True)
        try:
            run = f"genmodels.cli.{self.command}.run"
            checked = Schema(run, lambda path: "in this point of the sweep", plain.get("trust") or ()).check(plain)
            folder, finished = self.place(words, checked), self.finished(words, checked)
            if finished is not None:  # a job that was started again, or an equal point
                return finished
            own = self.report(words, checked) if folder is None else {"run_dir": str(folder)}
            if folder is not None and (folder / "last.ckpt").is_file():
                own["resume"] = "last"
            with _alone([*self.program, *words, *(f"++{key}={in_hydra(value)}" for key, value in own.items())]):
                outcome = import_module(f"genmodels.cli.{self.command}").run(**checked | own)
            if folder is not None:
                record = {"config": _defining(checked), "outcome": asdict(outcome)}
                write_text(folder / "result.json", json.dumps(record, indent=1))
            return outcome
        except Exception as error:
            known = explain(self.command, error)
            if known is None:
                traceback.print_exc()
            else:
                print(f"genmodels {self.command}: {known[0]}", file=sys.stderr, flush=True)
            return Failure(known[0] if known else f"{type(error).__name__}: {error}")

    def title(self, words: Sequence[str]) -> str:
        """The settings that distinguish this point from the others, as on the command line."""
        plain = [word.lstrip("+") for word in words]
        return " ".join(word for word in plain if word.split("=")[0] in self.swept) or " ".join(plain)

    def place(self, words: Sequence[str], config: dict) -> Path | None:
        """The run folder of a point of `train`; None if the point goes on with a run."""
        if self.command != "train" or config.get("resume"):
            return None
        return Path(self.folder) / (folder_name(self.title(words)) or "defaults")

    def report(self, words: Sequence[str], config: dict) -> dict:
        """The place of the result of `evaluate` or `export` where it would be the same for all points, else empty."""
        name = folder_name(self.title(words))
        if self.command == "export" and not config.get("out"):
            return {"out": f"model_{name}.safetensors"}
        if self.command != "evaluate" or config.get("out"):
            return {}
        ckpt = config["ckpt"]
        single = ckpt if isinstance(ckpt, str) else ckpt[0] if len(ckpt) == 1 else None
        if single is None:
            return {"out": str(new_folder(Path(f"comparison_{name}")))}
        if {*self.swept} <= {"ckpt", "split", "limit"} and not single.startswith(HUB):
            return {}
        from genmodels.report.compare import report_target  # imports torch

        usual = report_target(place_of(single), None, False, config.get("split") or "test", config.get("limit"))
        return {"out": str(usual.with_stem(f"{usual.stem}_{name}"))}

    def finished(self, words: Sequence[str], config: dict) -> Any | None:
        """The outcome of a point finished before with the same model, data, trainer and seed; None otherwise."""
        folder = self.place(words, config)
        if folder is None:
            return None
        wanted = _defining(config)  # outside the try: an error of ours is no damaged record
        try:
            record = json.loads((folder / "result.json").read_text(encoding="utf-8"))
            if {"init": None, **record["config"]} != wanted:  # records of before lack init
                return None
            from genmodels.training.run import Outcome

            outcome = Outcome(**record["outcome"])
            outcome.row(), float(outcome)  # raise for values of other types
            return outcome
        except (OSError, ValueError, TypeError, KeyError):  # missing or damaged: it goes on from last.ckpt
            return None


def _defining(config: dict) -> dict:
    """The settings that define a run, as they are after a round trip through JSON."""
    parts = ("model", "data", "trainer", "seed", "init")
    return json.loads(json.dumps({part: config.get(part) for part in parts}, default=str))


def folder_name(title: str) -> str:
    """A name for the folder of a point, without characters that are special to a shell or to Hydra.

    Example:
        >>> folder_name("seed=0 model.net.channels=8"), folder_name("data.root=/a,b")
        ('seed-0_model.net.channels-8', 'data.root-_a_b_68f568e3')
    """
    plain = title.replace("=", "-").replace(" ", "_")
    name = re.sub(r"[^\w.-]", "_", plain, flags=re.ASCII)[:_LONGEST]
    return name if name == plain else f"{name}_{short_hash(title)}"


@contextmanager
def _alone(command_line: list[str]) -> Iterator[None]:
    """Command line and environment as if the point had been started alone, restored afterwards.

    Lightning starts further processes by repeating this one's command line; in a sweep it must repeat the point, not
    the sweep or the worker of a launcher, and must not take Hydra's record of the sweep for that of a single job. The
    variables that it leaves (LOCAL_RANK, MASTER_PORT, ...) and its open process group would otherwise make the next
    point one of those processes.
    """
    main = sys.modules["__main__"]
    argv, record, environment, spec = sys.argv, HydraConfig.instance().cfg, dict(os.environ), main.__spec__
    sys.argv, HydraConfig.instance().cfg, main.__spec__ = command_line, None, None
    try:
        yield
    finally:
        sys.argv, HydraConfig.instance().cfg, main.__spec__ = argv, record, spec
        os.environ.clear()
        os.environ.update(environment)
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()


class PointLauncher:
    """A launcher between sweeper and launcher: passes on the points to run, and keeps the results of all.

    A finished point is not started, equal points are started once, and a point whose process is killed has failed
    without ending the others.

    Arguments:
        launcher: Hydra's.
        composer: checks the points of a sweeper that chooses them one after the other.
        point: the task.
    """

    def __init__(self, launcher, composer: Composer, point: Point):
        self.launcher, self.composer, self.point = launcher, composer, point
        self.jobs: list[JobReturn] = []
        self.before = 0  # points that were finished before

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """The jobs of some points, in their order."""
        found: dict[tuple[str, ...], Any] = {}
        for words in dict.fromkeys(map(tuple, job_overrides)):
            try:
                found[words] = self.point.finished(words, self.composer.compose(list(words)))
            except InputError as error:
                found[words] = Failure(" ".join(str(error).split()))
        todo = [words for words, outcome in found.items() if outcome is None]
        self.before += sum(outcome is not None and not isinstance(outcome, Failure) for outcome in found.values())
        found |= zip(todo, self._run(todo, initial_job_idx), strict=True)
        jobs = [_job(found[tuple(words)], words) for words in job_overrides]
        self.jobs += jobs
        return jobs

    def _run(self, points: Sequence[Sequence[str]], number: int) -> list:
        if not points:
            return []
        try:
            with _every_job_awaited():
                return [job.return_value for job in self.launcher.launch(points, initial_job_idx=number)]
        except BrokenProcessPool:  # joblib ends all its workers when one is killed: repeated one by one to find it
            if len(points) == 1:
                return [Failure("its process was killed (often out of memory)")]
            return [found for i, point in enumerate(points) for found in self._run([point], number + i)]
        except (RuntimeError, OSError) as error:  # no cluster here, or one that refuses the job
            last = str(error).strip().split("\n")[-1]
            raise RunError(f"{type(self.launcher).__name__}: {' '.join(last.split())}") from error


def _job(found: Any, words: Sequence[str] = ()) -> JobReturn:
    return JobReturn(overrides=list(words), status=JobStatus.COMPLETED, _return_value=found)


@contextmanager
def _every_job_awaited() -> Iterator[None]:
    """Count jobs of submitit without a result as failed; by itself it raises at the first and drops the others."""
    try:
        from submitit import Job
    except ImportError:
        yield
        return
    results = Job.results

    def patient(job) -> list:
        try:
            return results(job)
        except Exception:  # out of time, killed, or not to be unpickled; submitit has no common class for these
            return [_job(Failure(f"job {job.job_id} ended without a result: see {job.paths.stderr}"))]

    Job.results = patient
    try:
        yield
    finally:
        Job.results = results


def table_of(points: list[tuple[str, object]]) -> list[str]:
    """A table of the metrics of a sweep, one line per point; empty if no point has any.

    Example:
        >>> from genmodels.training.run import Outcome
        >>> done = Outcome({"val/nll": "= 1.25(3)"}, 1.25, 100, "runs/a")
        >>> for line in table_of([("seed=0", done), ("seed=1", Failure("out of memory"))]):
        ...     print(line)
        <BLANKLINE>
        point   val/nll    step  run
        ------  ---------  ----  ------
        seed=0  = 1.25(3)  100   runs/a
        seed=1  failed
    """
    rows = [(title, found.row() if hasattr(found, "row") else {}, found) for title, found in points]
    names = list(dict.fromkeys(name for _, row, _ in rows for name in row))
    if not names:
        return []
    lines = []
    for title, row, found in rows:
        cells = [row.get(name, "") for name in names]
        lines.append([title, *(["failed", *cells[1:]] if isinstance(found, Failure) else cells)])
    return ["", table(lines, ["point", *names], rule=True)]


def sweep(composer: Composer, overrides: list[str]) -> int:
    """Run every point, also after others have failed, and print their metrics in a table; 1 if any failed.

    Raises:
        InputError: when a point is wrong, before any has started, or there is nothing to resume.
    """
    parsed, resumed = _resumed(composer, composer.parse(overrides))
    words = [override.input_line for override in parsed]
    for given in parsed:
        key = given.key_or_group
        if key in ("out", "path") and not given.is_sweep_override() and given.value() is not None:
            raise InputError(f"{key}={given.value()} is one place for all points of the sweep: leave it out")
        if key == "run_dir" and (given.is_sweep_override() or given.value() is not None):
            raise InputError("run_dir: a sweep names the folders of its points by their settings, in a folder of its "
                             "own: leave run_dir out, hydra.sweep.dir= chooses that folder")
    if not composer.points(words):
        empty = [o.key_or_group for o in parsed if o.is_sweep_override() and not list(o.sweep_iterator())]
        raise InputError(f"{', '.join(empty) or 'the sweep'} has no values: nothing would run")
    settings = composer.settings(parsed)
    folder = resumed or _folder(settings, parsed)
    swept = [o.key_or_group for o in parsed if o.is_sweep_override()] + list(settings.sweeper.get("params") or {})
    program = (sys.argv[0], *([composer.command] if sys.argv[1:2] == [composer.command] else []))
    kept = {name: (folder / name).read_bytes() for name in ("multirun.yaml", "summary.txt")
            if resumed and (folder / name).is_file()}  # fmt: skip
    task = Point(composer.command, tuple(swept), str(folder), program)
    config = composer.hydra.compose_config(
        composer.command, [*words, "hydra.mode=MULTIRUN", f"hydra.sweep.dir={in_hydra(str(folder))}"],
        run_mode=RunMode.MULTIRUN, with_log_configuration=True,
    )
    try:
        sweeper = _sweeper(composer, task, config)
        sweeper.launcher = launches = PointLauncher(sweeper.launcher, composer, task)
        sweeper.sweep(arguments=OmegaConf.to_container(config.hydra.overrides.task))
    except InputError:
        with suppress(OSError):  # a sweep that is refused leaves no empty folder
            folder.rmdir()
        raise
    if all(isinstance(job.return_value, Failure) for job in launches.jobs):  # perhaps by settings of another sweep
        for name, content in kept.items():
            write_whole(folder / name, lambda file, content=content: file.write(content))
        folder = None if "summary.txt" in kept else folder
    chosen = not settings.sweeper._target_.endswith("BasicSweeper")
    return _report(launches, folder if composer.command == "train" else None, chosen)


def _sweeper(composer: Composer, task: Point, config: DictConfig) -> Sweeper:
    """The sweeper that the configuration names: a plugin of Hydra or a class of genmodels."""
    context = HydraContext(config_loader=composer.hydra.config_loader, callbacks=Callbacks(config))
    kept = {"hydra_context": context, "task_function": task, "config": config}
    if not config.hydra.sweeper._target_.startswith("genmodels."):
        return Plugins.instance().instantiate_sweeper(**kept)
    options = {key: value for key, value in config.hydra.sweeper.items() if key != "_target_"}
    sweeper = get_class(config.hydra.sweeper._target_)(**options)
    sweeper.setup(**kept)
    return sweeper


def _report(launches: PointLauncher, folder: Path | None, chosen: bool) -> int:
    """Print the failures, the table and, where the sweeper has chosen the points, the best of them; the exit code."""
    title, jobs = launches.point.title, launches.jobs
    failed = [job for job in jobs if isinstance(job.return_value, Failure)]
    for job in failed:
        print(f"genmodels {launches.point.command}: failed: {title(job.overrides)} ({job.return_value.message})",
              file=sys.stderr)
    lines = table_of([(title(job.overrides), job.return_value) for job in jobs])
    before = f" ({launches.before} of them before)" if launches.before else ""
    lines += ["", f"{len(jobs) - len(failed)} of {len(jobs)} points done{before}"]
    done = [job for job in jobs if hasattr(job.return_value, "__float__")]
    if chosen and done:
        lines.append(f"best:     {title(min(done, key=lambda job: float(job.return_value)).overrides)}")
    print(*lines, sep="\n", flush=True)
    if folder is not None:
        write_text(folder / "summary.txt", "\n".join(lines[1:]) + "\n")
        again = f"; failed and missing points: the same command with resume={folder}" if failed else ""
        print(f"summary:  {folder / 'summary.txt'}{again}", flush=True)
    return 1 if failed else 0


def _folder(settings: DictConfig, parsed: list[Override]) -> Path:
    """The folder of a new sweep.

    Raises:
        InputError: if the one that is named holds a sweep.
    """
    folder = Path(settings.sweep.dir).expanduser()
    if not any(o.key_or_group == "hydra.sweep.dir" for o in parsed):
        return new_folder(folder)
    if (folder / "multirun.yaml").exists():
        raise InputError(f"hydra.sweep.dir={folder} already holds a sweep: add resume=last, or choose another folder")
    return folder


def _resumed(composer: Composer, parsed: list[Override]) -> tuple[list[Override], Path | None]:
    """The overrides without `resume`, and the folder of the sweep that is resumed if there is one.

    A checkpoint to resume is that of a point, and stays with its overrides.

    Raises:
        InputError: when there is no sweep to resume.
    """
    given = next((o for o in parsed if o.key_or_group == "resume" and not o.is_sweep_override()), None)
    value = None if given is None else given.value()
    others = [o for o in parsed if o is not given]
    if composer.command != "train" or value is None:
        return parsed, None
    if value != "last":
        folder = Path(str(value)).expanduser()
        if not (folder / "multirun.yaml").is_file():
            return parsed, None
        # With its own settings and these, unless points or a group are given, as for a run (`Composer._of_run`).
        complete = any(o.is_sweep_override() or o.key_or_group in composer.groups
                       for o in others if not o.is_hydra_override())  # fmt: skip
        try:
            then = OmegaConf.load(folder / "multirun.yaml").hydra.overrides
            own = composer.parse([*then.task, *(o for o in then.hydra if not o.startswith(_SET_BY_US))])
        except (OmegaConfBaseException, yaml.YAMLError, AttributeError) as error:
            if complete:
                return others, folder
            raise InputError(f"{folder / 'multirun.yaml'} holds no settings of a sweep: give those of this one, as "
                             "on its command line") from error
        own = [o for o in own if o.key_or_group not in {given.key_or_group for given in others}]
        if not complete:
            return [*own, *others], folder
        if missing := [o.input_line for o in own if o.key_or_group in composer.groups]:
            raise InputError(f"resume={value}: with points or groups, give all settings of the sweep again, also "
                             f"{' '.join(missing)}")
        return others, folder
    settings = composer.settings(others)
    root = Path(settings.sweep.dir).expanduser().parent
    named = any(o.key_or_group == "hydra.sweep.dir" for o in parsed)
    records = [root / Path(settings.sweep.dir).name / "multirun.yaml"] if named else root.glob("*/multirun.yaml")
    wanted = _identity(others)
    found = []
    for record in records:
        with suppress(Exception):  # not a sweep of ours, or damaged
            then = OmegaConf.load(record).hydra
            same = then.job.name == composer.command and _identity(composer.parse(list(then.overrides.task))) == wanted
            found += [record] if same else []
    if not found:
        raise InputError(f"resume=last: no sweep with these settings in {root}: name its folder (resume={root}/...), "
                         "or leave resume out to start one")
    return others, max(found, key=lambda record: record.stat().st_mtime).parent


def _identity(parsed: list[Override]) -> tuple[list[str], list[str]]:
    """The fixed settings of a sweep and the keys that it varies, which a resumed sweep shares."""
    task = [o for o in parsed if not o.is_hydra_override()]
    fixed = sorted(o.input_line for o in task if not o.is_sweep_override())
    return fixed, sorted(o.key_or_group for o in task if o.is_sweep_override())
