"""`genmodels demo`: trained models on a page in the browser: samples, inpainting, interpolation, likelihood, speech.

The functions that compute call what `genmodels sample` and `genmodels evaluate` call; `page` puts them on a page of
gradio, and nothing else here needs gradio.
"""

from __future__ import annotations

import functools
import html
import io
import math
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

import genmodels as gm
from genmodels.cli.sample import between
from genmodels.core.data import Batch
from genmodels.core.errors import InputError, Interrupted, explain
from genmodels.core.likelihood import Likelihood, with_error
from genmodels.data.text import to_text
from genmodels.evaluation.materials import data_of, read_items
from genmodels.evaluation.samples import evenly_changing
from genmodels.plots.images import class_name, has_picture, images_of, mel_image, picture_of
from genmodels.speech.audio import write_wav

if TYPE_CHECKING:
    import gradio

_MOMENTS = 20  # on the slider of a trajectory
_RECORDED = 4 * _MOMENTS  # from which they are chosen
_LARGE = 256  # height in pixels of a picture to paint on
_USUAL = ("cond", "steps", "sampler", "guidance", "temperature", "seed")  # options on most tabs
_UNSET = (("steps", 0), ("cond", ""), ("sampler", ""))  # what leaves an option to the model
_SHUTDOWN = 2  # seconds that open connections have when the server ends
#: A content security policy: the browser connects to no other machine.
_POLICY = b"default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'"


def run(
    *, ckpt: str | list[str], host: str = "127.0.0.1", port: int = 7860, device: str = "auto",
    trust: list[str] | None = None,
) -> None:
    """Show trained models on a page in the browser.

    Arguments:
        ckpt: a checkpoint, a run folder, a .safetensors or hf://user/name, or a list of them.
        host: address that the page is served at; others than 127.0.0.1 let other machines use the models.
        port: its port, 0 for any that is free.
        device: auto, cpu, cuda, ...
        trust: further packages whose classes the checkpoints may name.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError:
        raise InputError("the page needs gradio: pip install 'genmodels[demo]'") from None
    del gradio
    names = [ckpt] if isinstance(ckpt, str) else ckpt
    if not names:
        raise InputError("ckpt=[] names no checkpoint")
    models = [gm.load(name, device=device, trust=trust or []) for name in names]
    try:
        _show(models, host, port)
    except Interrupted as stopped:
        if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
            message, code = explain("demo", stopped)
            print(f"genmodels demo: {message}", file=sys.stderr, flush=True)
            os._exit(code)  # Python would wait for a click that is still being computed
        raise


def _show(models: list[gm.Model], host: str, port: int) -> None:
    with listening(host, port) as opened, tempfile.TemporaryDirectory(prefix="genmodels-demo-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder  # what was dropped on the page is gone with it
        blocks = page(models)
        shown = f"[{host}]" if ":" in host else host
        print(f"open http://{shown}:{opened.getsockname()[1]} in a browser; Ctrl-C ends the page", flush=True)
        serve(blocks, opened, host)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at an address, which reserves it while the page is built.

    Raises:
        InputError: for an address that this machine does not have, or a port that is taken.
    """
    if not 0 <= port <= 65535:
        raise InputError(f"port must be from 0 to 65535, got {port}")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise InputError(f"host={host} port={port} cannot be used ({error.strerror}): choose another, or port=0 for "
                         "any that is free") from None


def draw(model: gm.Model, **options: Any) -> gm.Samples:
    """Samples as `genmodels sample` draws them, with their trajectory where the model has one."""
    path = {"path": _RECORDED} if model.network.takes("path") else {}
    return model.sample(progress=False, **path, **options)


def moments(drawn: gm.Samples) -> Tensor:
    """Moments of the trajectory from noise to data, (moments, n, *event); the last are the samples."""
    if drawn.path is None:
        return drawn.x[None]
    path = drawn.path[:-1] if len(drawn.path) > 1 else drawn.path  # the last step ends in the samples
    return torch.cat([path[evenly_changing(path, _MOMENTS - 1)].to(drawn.x), drawn.x[None]])


def look(drawn: gm.Samples, x: Tensor) -> Image.Image | str:
    """A picture of x, samples or a moment of their trajectory; HTML of texts and tables."""
    classes = drawn.cond if isinstance(drawn.cond, Tensor) else None
    picture = picture_of(x, drawn.spec, classes, drawn.index)
    if picture is not None:
        return picture
    if drawn.spec.encoding is not None:
        texts = "".join(f"<pre style='white-space: pre-wrap; border-top: 1px solid; margin: 0; padding: 0.4em 0'>"
                        f"{html.escape(to_text(one))}</pre>" for one in x)
        return f"<div style='max-height: 36em; overflow-y: auto'>{texts}</div>"
    return gm.Samples.of(replace(drawn, x=x), drawn.spec)._repr_html_()


def painted(layers: dict[str, Any]) -> tuple[Image.Image, Image.Image]:
    """The picture under a brush, and the mask of `genmodels sample`: black where something was painted, else white.

    Raises:
        InputError: without a picture, or where nothing or everything was painted.
    """
    if not layers or layers["background"] is None:
        raise InputError("there is no picture: show an item of the data, or drop a picture")
    picture = layers["background"].convert("RGB")
    mask = Image.new("L", picture.size, 255)
    for layer in layers["layers"]:
        mask.paste(0, mask=layer.convert("RGBA").getchannel("A").resize(picture.size).point(lambda a: 255 * (a > 0)))
    if mask.getextrema()[0] == 255:
        raise InputError("nothing is painted: paint over what is to be drawn anew")
    if mask.getextrema()[1] == 0:
        raise InputError("everything is painted: leave a part that is kept")
    return picture, mask


def inpaint(model: gm.Model, layers: dict[str, Any], **options: Any) -> gm.Samples:
    """Samples that keep a picture but for what was painted on it.

    Raises:
        InputError: as of `painted`.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = {"inpaint": f"{folder}/picture.png", "mask": f"{folder}/mask.png"}
        for file, image in zip(files.values(), painted(layers), strict=True):
            image.save(file)
        return model.sample(progress=False, **files, **options)


@functools.lru_cache(maxsize=8)
def data(model: gm.Model):
    """The data that a model was trained on, prepared once."""
    return data_of(model.network, model.header, model.ckpt, model.trust)()


def item(model: gm.Model, number: int | None, height: int = _LARGE) -> Image.Image:
    """The picture of an item of the test split, enlarged by a whole factor.

    Raises:
        InputError: for no number, or an item that does not exist.
    """
    if number is None:
        raise InputError("give the number of an item")
    batch = read_items([number], lambda: data(model), model.spec, "item")
    return images_of(batch.x, model.spec, smallest=height)[0]


def interpolation(model: gm.Model, ends: list[int | str | None], frames: int) -> Image.Image:
    """The strip of `genmodels sample interpolate=`.

    Raises:
        InputError: without one of the ends, or for an item that does not exist.
    """
    if None in ends:
        raise InputError("give two items by their numbers, or as pictures")
    return between(model.network, ends, frames, True, lambda: data(model))


def likelihood(model: gm.Model, file: str, cond: int | None = None, seed: int = 0) -> tuple[Image.Image, Likelihood]:
    """A picture in the size and the levels of the data, and its log-likelihood."""
    x = read_items([file], lambda: data(model), model.spec, "image").x
    return images_of(x, model.spec, smallest=_LARGE)[0], model.log_likelihood(Batch(x), cond, seed=seed)


def report(found: Likelihood) -> str:
    """The likelihood of one item in Markdown.

    Example:
        >>> print(report(Likelihood(torch.tensor([-64 * math.log(2.0)]), "lower_bound", 64, 17, torch.tensor([0.5]))))
        **<= 1.0000(113) bits/dim**
        <BLANKLINE>
        log p = -44.3614 +- 0.5000 nats, a lower bound
    """
    if len(found.nonfinite):
        return f"no likelihood: {found.made.get('reason', 'it is not finite')}"
    error = None if found.stderr is None else float(found.stderr[0])
    bits = None if error is None else error / (float(found.dims[0]) * math.log(2))
    noise = "" if error is None else f" +- {error:.4f}"
    kind = {"lower_bound": "a lower bound", "upper_bound": "an upper bound"}.get(found.kind, found.kind)
    return (f"**{found.mark} {with_error(found.mean_bits_per_dim(), bits)} bits/dim**\n\n"
            f"log p = {found.mean_nats():.4f}{noise} nats, {kind}")


def speech(model: gm.Model, *, text: str, **options: Any) -> tuple[bytes, Image.Image]:
    """A text as the content of a .wav file, and the picture of its mel.

    Raises:
        InputError: without a text.
    """
    if not text.strip():
        raise InputError("there is no text: write one")
    found = model.sample(text=text, progress=False, **options)
    write_wav(file := io.BytesIO(), found.waves[0], model.spec.mel["sample_rate"])
    return file.getvalue(), mel_image(found.texts[0].mel, 3, 3)


def abilities(model: gm.Model) -> list[str]:
    """The names of the tabs of a model."""
    if model.spec.text is not None:
        return ["Speech"]
    pictures = model.spec.is_image and model.spec.levels is not None
    known = {"Inpainting": model.network.takes("known"),
             "Interpolation": hasattr(model.network, "latents") and getattr(model.network, "has_velocity", True),
             "Likelihood": True}
    return ["Samples", *(name for name, able in known.items() if able and pictures)]


def answer(function: Callable, names: list[str], *given: Any) -> Any:
    """The result of a click; the last values are those of the named options, without those that leave the choice open.

    Raises:
        gradio.Error: with the line that the command would have printed.
    """
    import gradio as gr

    first = len(given) - len(names)
    options = {name: value for name, value in zip(names, given[first:], strict=True)
               if value is not None and (name, value) not in _UNSET}
    try:
        return function(*given[:first], **options)
    except Exception as error:
        known = explain("demo", error)
        if known is None:
            raise
        raise gr.Error(known[0], print_exception=False) from error


def page(models: list[gm.Model]) -> gradio.Blocks:
    """The page: a tab for each model, with one for each of its abilities."""
    import gradio as gr

    with gr.Blocks(analytics_enabled=False, title="genmodels", fill_width=True) as blocks:
        for number, model in enumerate(models, 1):
            with gr.Tab(f"{number}. {model.family}, {model.spec.name}"):
                gr.Markdown(repr(model))
                for name in abilities(model):
                    with gr.Tab(name):
                        _TABS[name](gr, model)
    return blocks


def _on(button, function: Callable, inputs: list, options: dict, outputs: list) -> None:
    button.click(functools.partial(answer, function, list(options)), [*inputs, *options.values()], outputs,
                 concurrency_id="model", concurrency_limit=1)  # fmt: skip


def _controls(gr, model: gm.Model, *names: str, n: int = 20, without: str = "no class") -> dict[str, Any]:
    """Controls of the named sampling options that a model takes; defaults of the command, but fewer rounds."""
    network, spec = model.network, model.spec
    classes = list(spec.speakers) or [class_name(spec, k) for k in range(network.num_classes or 0)]
    values = spec.as_given(list(range(len(classes))))
    choices = [*([] if spec.speakers else [(without, "")]), *zip(classes, values, strict=True)]
    made = {
        "n": lambda: gr.Slider(1, max(64, 4 * n), n, step=1, label="Samples"),
        "cond": lambda: gr.Dropdown(choices, value=choices[0][1], label="Speaker" if spec.speakers else "Class"),
        "steps": lambda: gr.Slider(0, 250, 0, step=1, label="Steps (0: the sampler's own number)"),
        "sampler": lambda: gr.Dropdown([("the model's own", ""), *network.samplers], value="", label="Sampler"),
        "guidance": lambda: gr.Slider(0, 8, 1, step=0.25, label="Guidance"),
        "rounds": lambda: gr.Slider(1, 20, 3, step=1, label="Rounds (more fit what is kept better, and take longer)"),
        "speed": lambda: gr.Slider(0.5, 2, 1, step=0.05, label="Speed"),
        "temperature": lambda: gr.Slider(0, 1.5, network.default_temperature, step=0.01, label="Temperature"),
        "seed": lambda: gr.Number(0, precision=0, label="Seed"),
    }
    useless = {"sampler": not network.samplers, "cond": not classes, "guidance": not classes}
    return {name: made[name]() for name in names if network.takes(name) and not useless.get(name)}


def _picture(gr, **options: Any):
    return gr.Image(**{"format": "png", "show_label": False, "buttons": [], "interactive": False} | options)


def _reading(place):
    """A place for a picture that refuses other files in one line, where gradio would print a traceback."""
    read = place.preprocess

    def checked(payload):
        try:
            return read(payload)
        except Exception as error:  # of many classes
            raise InputError("this file is no picture that can be read: drop a .png or .jpg") from error

    place.preprocess = functools.partial(answer, checked, [])
    return place


def _given(gr, label: str):
    """A place for a picture, of which no pixel changes: the format by default is lossy."""
    return _reading(gr.Image(type="filepath", format="png", height=_LARGE, label=label))


def _samples(gr, model: gm.Model) -> None:
    kept = gr.State()

    def sampled(**options: Any):
        seen = moments(drawn := draw(model, **options))
        slider = gr.Slider(1, max(2, len(seen)), len(seen), step=1, visible=len(seen) > 1)
        return look(drawn, drawn.x), slider, (drawn, seen)

    def moment(held, position: int):
        return None if held is None else look(held[0], held[1][position - 1])

    points = model.spec.event_shape == (2,)
    drawn = has_picture(model.spec)
    n = 500 if points else 20 if model.spec.encoding is None else 6  # so many texts take a few seconds
    with gr.Row():
        with gr.Column(scale=1):
            options = _controls(gr, model, "n", *_USUAL, n=n, without="every class in turn")
            button = gr.Button("Sample", variant="primary")
        with gr.Column(scale=2):
            shown = _picture(gr) if drawn else gr.HTML()
            start = "noise" if model.spec.source is None else model.spec.source["name"]
            slider = gr.Slider(1, 2, 1, step=1, label=f"From {start} to data", visible=False)
    _on(button, sampled, [], options, [shown, slider, kept])
    slider.input(moment, [kept, slider], shown, show_progress="hidden", trigger_mode="always_last")


def _choice(gr, model: gm.Model, target) -> None:
    """A number and a button that puts the picture of an item into `target`."""
    number = gr.Number(0, precision=0, label="Item of the test split")
    _on(gr.Button("Show item"), lambda which: item(model, which), [number], {}, [target])


def _inpainting(gr, model: gm.Model) -> None:
    with gr.Row():
        with gr.Column():
            brush = gr.Brush(_LARGE // 6, ["#e04040"], color_mode="fixed")
            gr.Markdown("Paint over what is to be drawn anew")  # not the label, which the tools would hide in part
            editor = _reading(gr.ImageEditor(type="pil", show_label=False, brush=brush, layers=False,
                                             transforms=(), sources=("upload", "clipboard"), format="png",
                                             canvas_size=(2 * _LARGE, 2 * _LARGE)))
            _choice(gr, model, editor)
        with gr.Column():
            options = _controls(gr, model, "n", *_USUAL, "rounds", n=8)
            button = gr.Button("Draw", variant="primary")
        shown = _picture(gr)
    _on(button, lambda layers, **given: inpaint(model, layers, **given).picture, [editor], options, [shown])


def _interpolation(gr, model: gm.Model) -> None:
    with gr.Row():
        sides = [(gr.Number(k, precision=0, label=f"{side}: item of the test split"),
                  _given(gr, "or a picture in its place"))
                 for k, side in enumerate(("From", "To"))]
        frames = gr.Slider(3, 20, 10, step=1, label="Pictures")
    button = gr.Button("Interpolate", variant="primary")
    shown = _picture(gr)

    def strip(first, other_first, last, other_last, count: int):
        return interpolation(model, [other_first or first, other_last or last], count)

    _on(button, strip, [part for side in sides for part in side] + [frames], {}, [shown])


def _likelihood(gr, model: gm.Model) -> None:
    with gr.Row():
        with gr.Column():
            given = _given(gr, "A picture")
            _choice(gr, model, given)
            options = _controls(gr, model, "cond", "seed")
            button = gr.Button("Log-likelihood", variant="primary")
        with gr.Column():
            text = gr.Markdown()
            seen = _picture(gr, label="What the model is given", show_label=True, height=_LARGE)

    def measured(file, **chosen):
        if file is None:
            raise InputError("there is no picture: show an item of the data, or drop a picture")
        picture, found = likelihood(model, file, **chosen)
        return report(found), picture

    _on(button, measured, [given], options, [text, seen])


def _speech(gr, model: gm.Model) -> None:
    text = gr.Textbox(model.spec.text["examples"][0], lines=3, label="Text")
    with gr.Row():
        options = _controls(gr, model, *_USUAL, "speed")
    button = gr.Button("Speak", variant="primary")
    player = gr.Audio(label="Sound", format="wav")
    shown = _picture(gr)
    _on(button, functools.partial(speech, model), [], {"text": text, **options}, [player, shown])


_TABS = {"Samples": _samples, "Inpainting": _inpainting, "Interpolation": _interpolation, "Likelihood": _likelihood,
         "Speech": _speech}


def serve(blocks: gradio.Blocks, opened: socket.socket, host: str) -> None:
    """Serve the page until Ctrl-C, without connections to other machines."""
    import gradio as gr
    import uvicorn
    from fastapi import FastAPI
    from fastapi.middleware.trustedhost import TrustedHostMiddleware

    address, port = opened.getsockname()[:2]
    theme = gr.themes.Default(font=["sans-serif"], font_mono=["monospace"])
    app = gr.mount_gradio_app(FastAPI(), blocks, path="", server_name=address, server_port=port, footer_links=[],
                              ssr_mode=False, theme=theme, pwa=False)
    if address.startswith("127."):  # a web site whose own name leads here (DNS rebinding) is not answered
        app = TrustedHostMiddleware(app, [host, address, "localhost"])

    async def alone(scope, receive, send):
        async def sent(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"content-security-policy", _POLICY)]
            await send(message)

        await app(scope, receive, sent)

    config = uvicorn.Config(alone, log_level="critical", timeout_graceful_shutdown=_SHUTDOWN)
    uvicorn.Server(config).run(sockets=[opened])
