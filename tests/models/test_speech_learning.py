"""What a speaking model learns: one clip by heart, and from twenty minutes which transcripts are wrong. Slow."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from genmodels.cli.main import main
from genmodels.core.random import KeyedGenerator
from genmodels.data.speech import Speech
from genmodels.evaluation.speech import suspects
from genmodels.models.glow_tts import GlowTTS
from genmodels.speech.text import Symbols
from genmodels.speech.text_encoder import TextEncoder

STEPS, RATE = 300, 2e-3
WRONG = 0.05  # share of transcripts that belong to other clips


def overfitted() -> tuple[float, float, float]:
    """(L1 of the log-mel at the found durations, entropy of the alignment before, after) of one shipped clip."""
    torch.manual_seed(0)
    data = Speech(batch_size=1).prepare()
    clip = next(iter(data.loader("train", 1)))
    model = GlowTTS(data.spec, encoder={"channels": 96, "depth": 2, "hidden": 192, "dropout": 0.0}, steps=4, hidden=64,
                    depth=2, dropout=0.0, duration_channels=96, ema_decay=0.0)

    def entropy() -> float:
        """Nats a frame of the posterior of its token."""
        model.eval()
        p = model.posterior(clip, "raw").clamp(1e-12, 1)
        model.train()
        return float(-(p * p.log()).sum() / clip.mask.sum())

    model.initialize(clip)
    before = entropy()
    optimizer = torch.optim.Adam(model.core.parameters(), lr=RATE)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 20)
        optimizer.zero_grad()
        model.loss(clip, KeyedGenerator(step, clip.item_index, "overfit")).value.backward()
        torch.nn.utils.clip_grad_norm_(model.core.parameters(), 5)
        optimizer.step()
    after = entropy()
    model.eval()
    said = clip.cond.tokens[0, clip.cond.mask[0, 0]].tolist()
    found = model.aligned(clip, "raw").durations[0, clip.cond.mask[0, 0]].tolist()
    text = Symbols(tuple(data.spec.text["symbols"]), data.spec.text["blanks"]).decode(said)
    spoken = model.sample(1, temperature=0, text=text, durations=[found], weights="raw")
    frames = int(clip.mask.sum())
    return float((spoken.x[0, :, :frames] - clip.x[0, :, :frames]).abs().mean()), before, after


@pytest.mark.slow
def test_one_clip_is_learnt_by_heart(monkeypatch):
    far, before, after = overfitted()
    assert far < 0.3 and after < before / 2
    # Without a gradient into the means the text says nothing, and the same steps come nowhere near.
    whole = TextEncoder.forward

    def detached(self, *inputs):
        h, mu, log_sigma = whole(self, *inputs)
        return h, mu.detach(), log_sigma

    monkeypatch.setattr(TextEncoder, "forward", detached)
    assert overfitted()[0] > 0.6


@pytest.mark.slow
def test_wrong_transcripts_stand_first_by_the_evidence(tmp_path, monkeypatch, shared_data):
    """A model trained on texts of which one in twenty belongs to another clip, and told of none, finds them."""
    source, root = shared_data / "LJSpeech-sample", tmp_path / "data"
    if not source.is_dir():
        pytest.skip(f"no LJSpeech-sample in {shared_data}")
    root.mkdir()
    (root / "wavs").symlink_to(source / "wavs")
    rows = [line.split("|") for line in (source / "metadata.csv").read_text().splitlines()]
    chosen = random.Random(0).sample(range(len(rows)), round(WRONG * len(rows)))
    texts = [rows[k][1:] for k in chosen]
    for k, text in zip(chosen, texts[1:] + texts[:1], strict=True):
        rows[k][1:] = text
    (root / "metadata.csv").write_text("\n".join(map("|".join, rows)) + "\n")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "model=glow_tts", "data=speech", "data.layout=ljspeech", f"data.root={root}", "run_dir=run",
                 "data.blanks=false", "data.max_frames=1600", "model.steps=4", "model.dropout=0.1", "logger=csv",
                 "model.optimizer.lr=2e-3", "trainer.max_steps=1500", "trainer.validate_every_n_steps=1500",
                 "trainer.sample_every_n_steps=0", "trainer.progress=false"]) == 0  # fmt: skip
    assert main(["evaluate", "ckpt=run/last.ckpt", "split=train", "audit=true", "stages=[likelihood]",
                 "out=audit.json"]) == 0  # fmt: skip
    ranking = json.loads((tmp_path / "audit.json").read_text())["audit"]
    wrong = {rows[k][0] for k in chosen} & {Path(row["name"]).stem for row in ranking}

    def found(order: list[dict]) -> float:
        """Share of the wrong transcripts among the first tenth."""
        return len(wrong & {Path(row["name"]).stem for row in order[: len(order) // 10]}) / len(wrong)

    assert len(wrong) >= 5 and found(suspects(ranking)) >= 0.8
    # The likelihood of the sound alone says how well clips are known, and does not find them.
    assert found(ranking) < 0.8
