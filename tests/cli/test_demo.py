"""`genmodels demo`: what the page computes is what the commands compute; and the page itself, in a browser."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import urllib.request
import wave
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

import genmodels as gm
from genmodels.cli import demo
from genmodels.cli.main import main
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, Interrupted
from genmodels.evaluation.materials import read_mask
from genmodels.models.glow_tts import GlowTTS
from genmodels.speech.text import CHARACTERS
from tests.untrained import digits_ddpm, write


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A checkpoint with a network that is not trained."""
    return write(digits_ddpm(), tmp_path_factory.mktemp("run") / "best.ckpt")


@pytest.fixture(scope="module")
def model(digits):
    return gm.load(digits, device="cpu")


def test_samples_are_those_of_the_command_and_end_their_trajectory(model, digits, tmp_path):
    assert main(["sample", f"ckpt={digits}", "n=3", "cond=[4]", "steps=5", "guidance=2", "temperature=0.8", "seed=7",
                 f"out={tmp_path / 'a.npz'}"]) == 0
    drawn = demo.draw(model, n=3, cond=4, steps=5, guidance=2, temperature=0.8, seed=7)
    assert torch.equal(drawn.x, torch.from_numpy(np.load(tmp_path / "a.npz")["x"]))
    seen = demo.moments(drawn)
    assert len(seen) == 5 and torch.equal(seen[-1], drawn.x) and not torch.equal(seen[0], drawn.x)
    assert demo.look(drawn, seen[-1]) == drawn.picture != demo.look(drawn, seen[0])


def test_a_likelihood_is_that_of_evaluate(model, tmp_path):
    demo.item(model, 0).save(tmp_path / "item.png")
    given = model.items(1)
    seen, found = demo.likelihood(model, str(tmp_path / "item.png"), cond=int(given.cond))
    row = gm.evaluate(model, limit=1, stages=["likelihood"], cache=False).table.models[0].likelihood[0]
    assert found.mean_bits_per_dim() == pytest.approx(row.value, abs=1e-5) and row.kind == found.kind
    assert f"<= {found.mean_bits_per_dim():.4f}" in demo.report(found) and "a lower bound" in demo.report(found)
    shades = torch.from_numpy(np.array(seen.resize((8, 8), Image.Resampling.NEAREST)))
    assert torch.equal((shades.float() * 16 / 255).round().to(torch.uint8), given.x[0, 0])
    lost = model.log_likelihood(given)
    lost.nats[0], lost.made["reason"] = float("nan"), "there is none"
    assert demo.report(lost) == "no likelihood: there is none"


def test_inpainting_keeps_what_was_not_painted(model):
    stroke = Image.new("RGBA", (256, 256))
    ImageDraw.Draw(stroke).rectangle((0, 0, 255, 127), fill=(255, 0, 0, 128))
    layers = {"background": demo.item(model, 2).convert("RGBA"), "layers": [stroke], "composite": None}
    drawn = demo.inpaint(model, layers, n=4, steps=3, rounds=1)
    known = model.items(3).x[2]
    assert bool((drawn.x[:, :, 4:] == known[:, 4:]).all()) and bool((drawn.x[:, :, :4] != known[:, :4]).any())
    everything = Image.new("RGBA", (256, 256), (255, 0, 0, 255))
    for wrong, part in (({}, "no picture"), (layers | {"layers": []}, "nothing is painted"),
                        (layers | {"layers": [everything]}, "everything is painted")):
        with pytest.raises(InputError, match=part):
            demo.inpaint(model, wrong)


def test_a_faint_stroke_is_painted_too(tmp_path):
    stroke = Image.new("RGBA", (8, 8))
    stroke.putpixel((3, 5), (0, 0, 0, 1))
    demo.painted({"background": Image.new("L", (8, 8)), "layers": [stroke]})[1].save(tmp_path / "mask.png")
    keep = read_mask(str(tmp_path / "mask.png"), DataSpec("image", (1, 8, 8), levels=2), "mask")
    assert (~keep).nonzero().tolist() == [[0, 5, 3]]


def test_an_interpolation_is_that_of_the_command(model, digits, tmp_path, monkeypatch):
    monkeypatch.setattr("genmodels.evaluation.materials.interpolate",
                        lambda network, ends, frames, weights: ends.x[[0, 1, 0]])
    assert main(["sample", f"ckpt={digits}", "interpolate=[1,2]", "frames=3", f"out={tmp_path / 'a.png'}"]) == 0
    with Image.open(tmp_path / "a.png") as image:
        assert demo.interpolation(model, [1, 2], 3).tobytes() == image.tobytes()
    for ask, part in ((lambda: demo.interpolation(model, [None, 2], 3), "give two items"),
                      (lambda: demo.item(model, None), "give the number of an item"),
                      (lambda: demo.item(model, 10**30), "indices must lie in 0..358"),
                      (lambda: demo.item(model, -(10**30)), "indices must lie in 0..358")):
        with pytest.raises(InputError, match=part):
            ask()


def test_no_picture_is_compressed_with_losses(model):
    """Each place for a picture is asked for PNG: the default of gradio changes levels, and with them likelihoods."""
    made, gr = [], MagicMock()
    gr.Image.side_effect = gr.ImageEditor.side_effect = lambda **options: made.append(options) or MagicMock()
    for name in demo.abilities(model):
        demo._TABS[name](gr, model)
    assert len(made) >= 6 and {options.get("format") for options in made} == {"png"}


def test_a_text_is_the_sound_of_the_model(tmp_path):
    mel = {"sample_rate": 8000, "n_fft": 256, "hop": 64, "n_mels": 4, "f_min": 0.0, "f_max": 4000.0}
    text = {"symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": ["a cab"]}
    spec = DataSpec("speech", (4, 40), mel=mel, statistics={"mean": -5.0, "std": 2.0}, text=text)
    network = GlowTTS(spec, encoder={"channels": 8, "depth": 1, "hidden": 8}, steps=1, hidden=8, depth=1)
    speaking = gm.load(write(network, tmp_path / "best.ckpt"))
    content, picture = demo.speech(speaking, text="a bad cab", seed=3)
    expected = speaking.sample(text="a bad cab", seed=3)
    with wave.open(io.BytesIO(content)) as sound:
        assert sound.getframerate() == 8000 and sound.getnframes() == len(expected.waves[0])
    assert picture.width == 3 * expected.texts[0].mel.shape[1] and demo.abilities(speaking) == ["Speech"]
    with pytest.raises(InputError, match="there is no text"):
        demo.speech(speaking, text=" ")


def test_texts_and_tables_are_html():
    bytes_of = torch.tensor([[list(b"a<b")]], dtype=torch.uint8)
    for spec, x, part in ((DataSpec("text", (1, 3), levels=256, encoding="utf-8"), bytes_of, "a&lt;b"),
                          (DataSpec("table", (3,)), torch.tensor([[0.5, 1.0, 2.0]]), "<td>0.5</td><td>1</td>")):
        drawn = gm.Samples.of(gm.core.samples.Samples(x, None, torch.arange(1), {}), spec)
        assert part in demo.look(drawn, demo.moments(drawn)[-1])


def test_a_click_leaves_out_what_is_empty_and_shows_refusals_as_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", types.SimpleNamespace(Error=_Refused))
    names, values = ("steps", "cond", "seed", "sampler", "rounds", "text"), (0, 0, 0, "", None, "")
    assert demo.answer(lambda *given, **own: (given, own), names, "a", *values) == (
        ("a",), {"cond": 0, "seed": 0, "text": ""})  # an empty text is no text of the model's choice

    def refuse(**options):
        raise InputError("no\nsteps")

    with pytest.raises(_Refused, match="^no steps$"):
        demo.answer(refuse, ["steps"], 3)
    with pytest.raises(ZeroDivisionError):
        demo.answer(lambda: 1 / 0, [])


class _Refused(Exception):
    def __init__(self, message: str, print_exception: bool):
        super().__init__(message)


def test_refusals_come_before_the_page(digits, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["demo", f"ckpt={digits}"]) == 2
    assert capsys.readouterr().err == "genmodels demo: the page needs gradio: pip install 'genmodels[demo]'\n"
    monkeypatch.setitem(sys.modules, "gradio", types.SimpleNamespace())
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(open(digits, "rb").read()[:-100])
    with demo.listening("127.0.0.1", 0) as taken:
        for words, code, part in ((["ckpt=[]"], 2, "names no checkpoint"), ([f"ckpt={cut}"], 1, "cut.ckpt"),
                                  ([f"ckpt={digits}", "port=70000"], 2, "from 0 to 65535"),
                                  ([f"ckpt={digits}", f"port={taken.getsockname()[1]}"], 2, "cannot be used"),
                                  ([f"ckpt={digits}", "host=nowhere.invalid"], 2, "cannot be used")):
            assert main(["demo", *words]) == code
            printed = capsys.readouterr().err
            assert part in printed and printed.count("\n") == 1


def test_the_page_ends_although_a_click_is_being_computed(digits, capsys, monkeypatch):
    def stop(*given):
        raise Interrupted("interrupted")

    monkeypatch.setitem(sys.modules, "gradio", types.SimpleNamespace())
    monkeypatch.setattr(demo, "_show", stop)
    monkeypatch.setattr(os, "_exit", ended := MagicMock())
    assert main(["demo", f"ckpt={digits}"]) == 130 and not ended.called
    over = threading.Event()
    click = threading.Thread(target=over.wait)
    click.start()
    try:
        main(["demo", f"ckpt={digits}"])
    finally:
        over.set()
        click.join()
    assert ended.call_args.args == (130,)
    assert capsys.readouterr().err.startswith("genmodels demo: interrupted\ngenmodels demo: interrupted\n")


def test_what_is_no_picture_is_refused_in_one_line(model, tmp_path):
    gr = pytest.importorskip("gradio")
    (tmp_path / "notes.png").write_text("no picture")
    Image.new("RGB", (8, 8)).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:40])
    with gr.Blocks():
        editor = demo._reading(gr.ImageEditor())
        place = demo._given(gr, "")
    assert place.preprocess(None) is None
    for name in ("notes.png", "cut.png"):
        file = {"path": str(tmp_path / name)}
        for component, given in ((place, file), (editor, {"background": file, "layers": [], "composite": None})):
            with pytest.raises(gr.Error) as refused:
                component.preprocess(component.data_model(**given))
            assert refused.value.message == "this file is no picture that can be read: drop a .png or .jpg"
            assert not refused.value.print_exception  # on the terminal, with a traceback


def test_a_page_of_this_machine_answers_to_no_other_name(monkeypatch):
    """A web site may let its own name lead to this machine; a browser would then give it the page."""
    gr = pytest.importorskip("gradio")
    import uvicorn
    from fastapi.testclient import TestClient

    with gr.Blocks() as blocks:
        gr.Markdown("hello")
    served = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: served.append(server.config.app))
    for address, host in (("127.0.0.1", "my-machine"), ("0.0.0.0", "0.0.0.0")):
        with demo.listening(address, 0) as opened:
            demo.serve(blocks, opened, host)
    codes = [[TestClient(app, base_url=f"http://{name}:7860").get("/").status_code for app in served]
             for name in ("127.0.0.1", "localhost", "my-machine", "site.example")]
    assert codes == [[200, 200], [200, 200], [200, 200], [400, 200]]


def _missing() -> str | None:
    packages = [name for name in ("gradio", "playwright") if importlib.util.find_spec(name) is None]
    if packages:
        return f"{packages[0]} is not installed"
    return None if shutil.which("chromium") else "chromium is not installed"


@pytest.mark.slow
@pytest.mark.skipif(_missing() is not None, reason=str(_missing()))
def test_the_page_in_a_browser(digits, tmp_path):
    """Samples, a moment of their trajectory, a likelihood; no other machine is asked; Ctrl-C is exit code 130.

    GENMODELS_DEMO_CKPT names another checkpoint of digits to look at, GENMODELS_DEMO_SHOTS a folder for screenshots.
    """
    from playwright.sync_api import sync_playwright

    shots = os.environ.get("GENMODELS_DEMO_SHOTS", str(tmp_path))
    words = [f"ckpt={os.environ.get('GENMODELS_DEMO_CKPT', digits)}", "port=0", "device=cpu"]
    server = subprocess.Popen([sys.executable, "-m", "genmodels", "demo", *words], stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.PIPE)
    try:
        address = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())[0]
        with urllib.request.urlopen(address, timeout=60) as answer:
            text, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"'](https?:)?//([^/\"']+)", text)
        assert not [host for _, host in loaded if host != address.partition("//")[2]]
        assert policy.startswith("default-src 'self'") and "http" not in policy
        with sync_playwright() as driver, driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        ) as browser:
            page = browser.new_page(viewport={"width": 1000, "height": 800})
            asked, wrong = set(), []
            page.on("request", lambda request: asked.add(request.url))
            page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
            page.goto(address)

            def shown(old: list[str] = ()) -> list[str]:
                """Addresses of the pictures, once there is another one than before."""
                page.wait_for_function(
                    "old => { const all = [...document.images].filter(i => i.checkVisibility() && i.naturalWidth)"
                    ".map(i => i.src); return all.length && all.some(one => !old.includes(one)) }", arg=list(old))
                return page.eval_on_selector_all("img", "all => all.map(i => i.src)")

            def click(name: str) -> None:
                page.get_by_role("button", name=name, exact=True).locator("visible=true").click()

            page.get_by_role("button", name="Sample", exact=True).wait_for()
            click("Sample")
            first = shown()
            page.get_by_label("Seed").locator("visible=true").fill("1")
            begun = time.monotonic()
            click("Sample")
            second = shown(first)
            print(json.dumps({"seconds from click to picture": round(time.monotonic() - begun, 2)}))
            page.screenshot(path=f"{shots}/samples.png")
            page.get_by_role("slider", name="From noise to data").fill("3")
            shown(second)
            page.screenshot(path=f"{shots}/moment.png")
            page.get_by_role("tab", name="Likelihood").locator("visible=true").click()
            before = page.eval_on_selector_all("img", "all => all.map(i => i.src)")
            click("Show item")
            shown(before)
            click("Log-likelihood")
            page.get_by_text("bits/dim").locator("visible=true").wait_for()
            page.screenshot(path=f"{shots}/likelihood.png")
            assert not wrong and {url.split("/")[2] for url in asked if url.startswith("http")} == {address[7:]}
    finally:
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 130 and errors == "genmodels demo: interrupted\n"
