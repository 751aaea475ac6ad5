"""Training on several processes gives the numbers of one, whoever starts them and however often they change."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch

from genmodels.core.checkpoint import read_header
from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.core.random import seed_of
from genmodels.energy import kernel_fit
from genmodels.models.base import GenerativeModel
from genmodels.models.build import NETWORKS
from genmodels.models.checkpoint import load_model, read_checkpoint
from genmodels.models.ddpm import DDPM, EnergyDDPM
from genmodels.models.energy import EnergyModel
from genmodels.models.few_steps import ConsistencyModel, MeanFlowModel, ShortcutModel
from genmodels.models.flow_matching import FlowMatchingModel
from genmodels.models.glow_tts import GlowTTS
from genmodels.models.masked_diffusion import MaskedDiffusionModel
from genmodels.models.normalizing_flows import MAF, NSF, Glow, Jet, RealNVP, TarFlow
from genmodels.models.recognizer import Recognizer
from genmodels.models.score import ScoreModel
from genmodels.models.text_to_mel import MelDDPM, MelEnergy, MelFlowMatching, Tacotron
from genmodels.nn import UNet
from tests.commands import ROOT, Started
from tests.models import texts
from tests.parameters import scattered
from tests.two_processes import fork, forked, joined

PATIENCE = 300  # seconds until a test gives up on its processes

DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
PLANE = DataSpec("plane", (2,))
UNET = {"channels": 8, "multipliers": [1, 2], "blocks": 1, "dropout": 0.3}
DIT = {"_target_": NETWORKS["dit"], "width": 16, "depth": 1, "heads": 2, "dropout": 0.3}
PERCEPTRON = {"hidden": 16, "depth": 1, "dropout": 0.3}
MELS = {"channels": 8, "multipliers": [1, 2], "blocks": 1}
SPEECH = {"encoder": {**texts.ENCODER, "dropout": 0.2}}

#: A small model of every family, with what several processes could get wrong: dropout, classes, learned parts.
MODELS = {
    "ddpm": lambda: DDPM(DIGITS, net=UNET, num_steps=20, self_conditioning=True),
    "ddpm hybrid": lambda: DDPM(DIGITS, net=UNET, num_steps=20, objective="hybrid", time_sampler="loss_aware"),
    "ddpm by a transformer": lambda: DDPM(DIGITS, net=DIT, num_steps=20),
    "ddpm vectors": lambda: DDPM(PLANE, net=PERCEPTRON, num_steps=20),
    "flow_matching": lambda: FlowMatchingModel(PLANE, net=PERCEPTRON, time_sampler="logit_normal"),
    "shortcut": lambda: ShortcutModel(PLANE, net=PERCEPTRON),
    "mean_flow": lambda: MeanFlowModel(PLANE, net=PERCEPTRON),
    "consistency": lambda: ConsistencyModel(PLANE, net=PERCEPTRON),
    "masked_diffusion": lambda: MaskedDiffusionModel(DIGITS, width=4, net=DIT),
    "glow": lambda: Glow(DIGITS, steps=2, hidden=8),
    "glow by inversion": lambda: Glow(DIGITS, steps=2, hidden=8, memory="inverse"),
    "realnvp": lambda: RealNVP(DIGITS, layout=["checkerboard*2", "squeeze", "channel*2"], hidden=8, depth=1,
                               dropout=0.3, dequantisation="variational"),
    "maf": lambda: MAF(PLANE, hidden=8),
    "nsf": lambda: NSF(PLANE, hidden=8),
    "tarflow": lambda: TarFlow(DIGITS, blocks=2, width=16, depth=1, heads=2, dropout=0.3, class_conditional=True),
    "jet": lambda: Jet(DIGITS, couplings=2, width=16, depth=1, heads=2),
    "energy": lambda: EnergyModel(PLANE, net={"hidden": [16, 16]}),
    "energy of images": lambda: EnergyModel(DIGITS, net={"channels": [8, 8]}),
    "deep kernel": lambda: EnergyModel(PLANE, network="deep_kernel", net={"inducing": 5}),
    "energy at every level": lambda: EnergyDDPM(DIGITS, net=MELS),
    "score": lambda: ScoreModel(DIGITS, net=MELS),
    "score of vectors": lambda: ScoreModel(PLANE, net={"hidden": 16, "depth": 1}),
    "glow_tts": lambda: GlowTTS(texts.spec(), **SPEECH, steps=2, hidden=8, depth=1, dropout=0.2, duration_channels=8),
    "tacotron": lambda: Tacotron(texts.spec(), **SPEECH, hidden=8, prenet=8),
    "recognizer": lambda: Recognizer(texts.spec(), net={"channels": 8, "depth": 1, "heads": 2, "hidden": 8,
                                                        "dropout": 0.3}),
    "mel_ddpm": lambda: MelDDPM(texts.spec(), **SPEECH, net=MELS, duration_channels=8),
    "mel_flow_matching": lambda: MelFlowMatching(texts.spec(), **SPEECH, net=MELS, duration_channels=8),
    "mel_energy": lambda: MelEnergy(texts.spec(), **SPEECH, net=MELS, duration_channels=8),
}
SIZES = ((3, 9), (5, 14), (2, 6), (4, 11), (6, 16), (3, 8), (2, 7), (5, 12))


def items(spec: DataSpec, width: torch.dtype) -> Batch:
    generator = torch.Generator().manual_seed(1)
    if spec.text is not None:
        return texts.batch(SIZES)
    if spec.levels is None:
        return Batch(torch.randn(8, 2, generator=generator, dtype=width), index=torch.arange(8))
    x = torch.randint(0, 17, (8, 1, 8, 8), generator=generator, dtype=torch.uint8)
    return Batch(x, torch.arange(8) % 10, index=torch.arange(8))


def share(batch: Batch, rank: int, world: int) -> Batch:
    """The rows of a process, padded to the longest among them."""
    mine = batch.rows(torch.arange(rank, len(batch), world))
    if mine.mask is None:
        return mine
    frames = int(mine.mask.sum(-1).max())
    return Batch(mine.x[..., :frames], mine.cond, mine.mask[..., :frames], mine.index)


def gradients(name: str, rank: int = 0, world: int = 1, width: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Of the loss of a process' rows after two batches, accumulated as in training; and what became of buffers."""
    torch.manual_seed(0)
    model = MODELS[name]().to(width)
    model.seed, whole = 5, items(model.spec, width)
    model.initialize(whole)
    scattered(model.core, 0.05)
    for model.batches_seen in (3, 4):
        torch.manual_seed(seed_of(model.seed, "dropout", model.batches_seen))
        batch = share(whole, rank, world)
        model.loss(batch, model.training_generator(len(batch))).value.backward()
    found = {key: p.grad for key, p in model.core.named_parameters() if p.grad is not None}
    return found | {f"buffer {key}": value for key, value in model.core.named_buffers() if value.is_floating_point()}


def _take_part(rank: int, meet: str, out: str, names: list[str], width: torch.dtype) -> None:
    found = {}
    try:
        with joined(meet, rank):
            for name in names:
                own = gradients(name, rank, 2, width)
                mean = torch.cat([value.flatten() for value in own.values()]) / 2
                torch.distributed.all_reduce(mean)
                parts = mean.split([value.numel() for value in own.values()])
                found[name] = {key: part.view(own[key].shape) for key, part in zip(own, parts, strict=True)}
            torch.save(found, out)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def on_two_processes(folder: Path, names: list[str], width: torch.dtype = torch.float64) -> dict:
    """The mean gradients of two processes by name of the model, as the second has them."""
    folder.mkdir(exist_ok=True)
    paths = [str(folder / f"{rank}.pt") for rank in (0, 1)]
    forked(_take_part, *((rank, str(folder / "meet"), paths[rank], names, width) for rank in (0, 1)))
    return torch.load(paths[1], weights_only=True)


def distance(found: dict, expected: dict) -> float:
    """The largest difference, as a share of the largest gradient."""
    unused = found.keys() - expected.keys()  # processes wait for the gradient of every weight, if only for zeros
    assert expected.keys() <= found.keys() and not any(found[key].any() for key in unused)
    scale = max(float(value.abs().max()) for value in expected.values())
    assert scale > 0
    return max(float((found[key] - value).abs().max()) for key, value in expected.items()) / scale


@fork
def test_the_gradient_of_two_processes_is_that_of_one(tmp_path):
    found = on_two_processes(tmp_path, list(MODELS))
    apart = {name: distance(found[name], gradients(name)) for name in MODELS}
    assert {name: far for name, far in apart.items() if far >= 1e-10} == {}


@fork
def test_in_single_precision_too(tmp_path):
    names = ["ddpm", "glow by inversion", "energy", "glow_tts"]
    found = on_two_processes(tmp_path, names, torch.float32)
    apart = {name: distance(found[name], gradients(name, width=torch.float32)) for name in names}
    assert max(apart.values()) < 1e-4, apart


@fork
def test_it_catches_noise_that_is_not_that_of_the_global_batch_and_a_fit_to_the_own_rows(tmp_path, monkeypatch):
    own = GenerativeModel.training_generator
    monkeypatch.setattr(GenerativeModel, "training_generator",
                        lambda self, n: type(own(self, n))(self.seed, torch.arange(n), "train", self.batches_seen))
    monkeypatch.setattr(kernel_fit, "averaged", lambda values: values)
    names = ["ddpm", "glow", "deep kernel"]
    found = on_two_processes(tmp_path, names)
    assert all(distance(found[name], gradients(name)) > 1e-3 for name in names)


# ---- whole runs ----


SMALL = ["model=ddpm", "data=toy", "data.n_train=600", "data.n_val=50", "data.n_test=50", "data.batch_size=24",
         "model.net.hidden=16", "model.net.depth=1", "model.net.dropout=0.2", "model.num_steps=20",
         "model.ema_decay=0.9", "trainer.accumulate=2", "trainer.max_steps=40", "trainer.validate_every_n_steps=20",
         "trainer.sample_every_n_steps=0", "trainer.progress=false",
         "trainer.accelerator=cpu", "trainer.log_every_n_steps=10", "checkpoint.every_n_steps=5", "logger=csv",
         "model.optimizer.lr=0.002"]


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def begin(cwd: Path, *words: str, by: tuple[str, ...] = (), **environment: str) -> Started | subprocess.Popen:
    """train.py as a process of its own, perhaps by a module of Python's that starts it."""
    names = ("SLURM_", "MASTER_", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE", "TORCHELASTIC_", "GENMODELS_CHOICE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    if not by:
        return Started(str(ROOT / "train.py"), *SMALL, *words, cwd=cwd, environment=env | environment)
    command = [sys.executable, *by, str(ROOT / "train.py"), *SMALL, *words]
    return subprocess.Popen(command, cwd=cwd, env=env | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, start_new_session=True)


def ended(runs: list[Started | subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Exit code, output and messages of each."""
    try:
        told = [run.communicate(timeout=PATIENCE) for run in runs]
    finally:
        for run in runs:
            run.kill()
    return [(run.returncode, *texts) for run, texts in zip(runs, told, strict=True)]


def slurm(rank: int, tasks: int, port: str, folder: Path) -> dict[str, str]:
    """The environment of a task of srun, as far as it is read, with an scontrol that notes what it is asked for."""
    command = folder / "bin" / "scontrol"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f"#!/bin/sh\necho \"$@\" >> {folder}/scontrol.txt\n")
    command.chmod(0o755)
    return {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "genmodels", "SLURM_NTASKS": str(tasks), "SLURM_NNODES": "1",
            "SLURM_NTASKS_PER_NODE": str(tasks), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}  # fmt: skip


def wait_for_step(path: Path, step: int, runs: list[Started | subprocess.Popen]) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and all(run.poll() is None for run in runs):
        if path.is_file() and read_header(path, check=False)["step"] >= step:
            return
        time.sleep(0.01)
    raise AssertionError([run.communicate()[1] for run in runs if run.poll() is not None])


def weights(path: Path) -> dict[str, torch.Tensor]:
    found = read_checkpoint(path)
    assert found["genmodels"]["step"] == 40 and found["genmodels"]["finished"]
    return found["state_dict"]


def rows(folder: Path) -> list[str]:
    return [line.split(",")[0] for line in (folder / "metrics.csv").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run of one process that nobody stops."""
    from genmodels.cli.main import main

    folder = tmp_path_factory.mktemp("alone") / "run"
    assert main(["train", *SMALL, f"run_dir={folder}"]) == 0
    return folder


def same_run(folder: Path, alone: Path) -> None:
    """The weights, the averages and the rows of metrics.csv of one process, in one folder."""
    expected, found = weights(alone / "last.ckpt"), weights(folder / "last.ckpt")
    assert found.keys() == expected.keys() and any(key.startswith("ema.") for key in found)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)
    assert rows(folder) == rows(alone)


def test_a_job_of_slurm_is_queued_again_and_goes_on_with_another_number_of_processes(alone, tmp_path):
    """Two tasks until SIGUSR1 reaches one of them, then one: the run of one process, in one folder, logged once."""
    port, folder = free_port(), tmp_path / "runs/ddpm-toy_moons/job_4711"
    tasks = [begin(tmp_path, "resume=auto", **slurm(rank, 2, port, tmp_path)) for rank in (0, 1)]
    wait_for_step(folder / "last.ckpt", 5, tasks)
    tasks[1].send_signal(signal.SIGUSR1)
    (code, output, told), (other_code, other_output, other_told) = ended(tasks)
    assert (code, other_code, other_output, other_told) == (130, 0, "", ""), (told, other_told)
    assert "saved and job 4711 is queued again" in told and told.count("\n") == 1
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 4711\n"
    assert 5 <= read_header(folder / "last.ckpt")["step"] < 40
    ((code, output, told),) = ended([begin(tmp_path, "resume=auto", **slurm(0, 1, port, tmp_path))])
    assert code == 0 and "resumed at step" in output, told
    assert "trainer.devices is 2 in the checkpoint and is 1 here" in output
    assert [path.name for path in (tmp_path / "runs/ddpm-toy_moons").iterdir()] == ["job_4711"]
    same_run(folder, alone)


@pytest.mark.slow
def test_torchrun_ends_when_one_of_its_processes_is_killed_and_goes_on(alone, tmp_path):
    folder = tmp_path / "run"
    by = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")
    run = begin(tmp_path, "resume=auto", "run_dir=run", by=by)
    wait_for_step(folder / "last.ckpt", 5, [run])
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(run.pid)], capture_output=True, text=True)
    os.kill(int(listed.stdout.split()[-1]), signal.SIGKILL)
    start = time.monotonic()
    ((code, _, told),) = ended([run])
    assert code == 1 and time.monotonic() - start < 60
    assert told.count("genmodels train: another process of the run has ended") == 1, told
    ((code, output, told),) = ended([begin(tmp_path, "resume=auto", "run_dir=run", by=by)])
    assert code == 0 and output.count("resumed at step") == 1 and output.count("trained in") == 1, told
    same_run(folder, alone)


@pytest.mark.slow
def test_three_machines_that_lightning_serves(alone, tmp_path):
    """Each with a launch of its own, as a user would without torchrun and SLURM."""
    port = free_port()
    machines = [begin(tmp_path, "trainer.num_nodes=3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NODE_RANK=str(rank))
                for rank in range(3)]
    found = ended(machines)
    assert [code for code, *_ in found] == [0, 0, 0], [told for *_, told in found]
    assert found[0][1].count("trained in") == 1 and found[1][1] == found[2][1] == ""
    (folder,) = (tmp_path / "runs/ddpm-toy_moons").iterdir()
    same_run(folder, alone)


@pytest.mark.slow
def test_spread_weights_are_those_of_one_process(alone, tmp_path):
    """FSDP2 on two processes, whose checkpoints are in parts, in the middle one process, and again two to the end."""

    def two(*words) -> list:
        port = free_port()
        return [begin(tmp_path, "trainer.strategy=fsdp", *words, **slurm(rank, 2, port, tmp_path)) for rank in (0, 1)]

    last, parts = tmp_path / "run/last.ckpt", tmp_path / "run/last.parts"
    for first, tasks in ((5, two("run_dir=run")), (10, None)):
        tasks = tasks or [begin(tmp_path, "run_dir=run", "resume=last")]
        wait_for_step(last, first, tasks)
        tasks[0].send_signal(signal.SIGTERM)
        found = ended(tasks)
        assert [each[0] for each in found] == [130, 0][: len(tasks)] and "interrupted at step" in found[0][2], found
        assert parts.is_dir() == (len(tasks) == 2)
        load_model(last)
    found = ended(two("run_dir=run", "resume=last"))
    assert [each[0] for each in found] == [0, 0], found
    assert not list((tmp_path / "run").glob("*.parts"))
    same_run(tmp_path / "run", alone)


@pytest.mark.slow
def test_spread_weights_serve_the_ode_of_a_validation(tmp_path):
    """Every eighth item is solved twice, and one process of two has all of those: backward passes are unlike often."""
    words = ["model=flow_matching", "model.net.hidden=8", "data.n_train=300", "data.n_val=60", "data.batch_size=20",
             "trainer.max_steps=2", "trainer.validate_every_n_steps=1", "trainer.sample_every_n_steps=0"]
    found = ended([begin(tmp_path, *words, "trainer.devices=2", f"trainer.strategy={each}", f"run_dir={each}")
                   for each in ("ddp", "fsdp")])
    assert [code for code, *_ in found] == [0, 0], found
    values = [read_header(tmp_path / each / "last.ckpt")["figures"]["val/nll"] for each in ("ddp", "fsdp")]
    assert abs(values[0] - values[1]) < 1e-5


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_with_four(alone, tmp_path):
    run = begin(tmp_path, "run_dir=run", "trainer.devices=2")
    wait_for_step(tmp_path / "run/last.ckpt", 5, [run])
    run.send_signal(signal.SIGTERM)
    ((code, _, message),) = ended([run])
    assert code == 130, message
    ((code, output, message),) = ended([begin(tmp_path, "run_dir=run", "resume=last", "trainer.devices=4")])
    assert code == 0 and "trainer.devices is 2 in the checkpoint and is 4 here" in output, message
    same_run(tmp_path / "run", alone)


@pytest.mark.slow
def test_a_compiled_network_on_two_processes(tmp_path):
    """Against one process that compiles too: torch.compile draws the keys of dropout in its own way."""
    for devices in (1, 2):
        words = (f"run_dir=run{devices}", f"trainer.devices={devices}", "trainer.compile=true")
        ((code, _, message),) = ended([begin(tmp_path, *words)])
        assert code == 0, message
    same_run(tmp_path / "run2", tmp_path / "run1")


def test_spread_weights_are_refused_where_weights_have_to_be_whole():
    for name in ("glow", "energy", "energy at every level", "glow_tts"):
        with pytest.raises(InputError, match="trainer.strategy=fsdp is for models that call their networks whole"):
            MODELS[name]().sharded_networks()
    with pytest.raises(InputError, match="schedule=learned"):
        DDPM(PLANE, net=PERCEPTRON, schedule="learned", objective="continuous").sharded_networks()
    (network,) = MODELS["ddpm"]().sharded_networks()
    assert isinstance(network, UNet)
