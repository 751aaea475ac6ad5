"""The part of `genmodels sample` for models of speech: texts spoken, at once or piece by piece."""

from __future__ import annotations

import time
from pathlib import Path

from genmodels.errors import InputError


def say(model, header: dict, ckpt_path, asked: dict, manner: dict, options: dict) -> list[str]:
    """Speak texts (the checkpoint's own examples, if there are none) and write them; what to tell the user.

    Arguments:
        model, header, ckpt_path: the checkpoint.
        asked: which texts, how many takes, where to.
        manner: arguments of `Manner`, None for those that nobody gave.
        options: further ones of the model's `sample`.

    Raises:
        InputError: for texts that cannot be spoken, or files that cannot be read.
    """
    from genmodels.evaluation.sampling import takes
    from genmodels.evaluation.sounding import vocoder_of
    from genmodels.evaluation.speaking import Manner, read_durations, speak, targets, write_spoken
    from genmodels.evaluation.streamed import speak_streamed
    from genmodels.speech.mel import MelConfig
    from genmodels.training.archive import checkpoint_hash

    for key in options:
        if not takes(model.sample, key):
            raise InputError(f"{key}: {header['family']} has no such option of sampling")
    if asked["text"] is not None and asked["text_file"] is not None:
        raise InputError("text and text_file: give one of the two")
    texts, takes = asked["text"], 1 if asked["n"] is None else asked["n"]
    if asked["text_file"] is not None:
        try:
            lines = Path(asked["text_file"]).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"text_file={asked['text_file']} cannot be read: {error}") from None
        texts = [line for line in lines if line.strip()]
    if texts is None:
        texts, takes = model.spec.text["examples"][: asked["n"]], 1
    texts = [texts] if isinstance(texts, str) else list(texts)
    given = {key: value for key, value in manner.items() if value is not None}
    if "durations" in given:
        given["durations"] = read_durations(Path(given["durations"]))
    how = Manner(**given, options=options)
    out = None if asked["out"] is None else Path(asked["out"])
    silent = out is not None and out.suffix.lower() == ".npz"
    # Made before anything is spoken, so that what it refuses is said at once.
    vocoder = None if silent else vocoder_of(how.vocoder, MelConfig(**model.spec.mel))
    chunk, which = asked["chunk"], {"takes": takes, "start": asked["start"]}
    begun = time.monotonic()
    if chunk is None:
        told, times = speak(model, texts, how, **which), []
    else:
        told, times = speak_streamed(model, texts, how, vocoder, chunk=chunk, **which)
    hop, rate = model.spec.mel["hop"], model.spec.mel["sample_rate"]
    seconds, took = sum(one.mel.shape[1] for one in told) * hop / rate, time.monotonic() - begun
    made = {"checkpoint": checkpoint_hash(ckpt_path), "step": header["step"], "family": header["family"]}
    places = targets(out, ckpt_path.parent / "samples", ckpt_path.stem, told, how.seed)
    what = "mels" if chunk is None or silent else "mels and sound"
    lines = [f"{what} of {seconds:.2f} s in {took:.2f} s (real-time factor {took / seconds:.3f}, {model.device})"]
    return lines + times + [line for one, place in zip(told, places, strict=True)
                    for line in write_spoken(one, model.spec, place, how, made, vocoder)]
