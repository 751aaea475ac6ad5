"""`genmodels transcribe`: what is said in recordings, by a trained recogniser."""

from __future__ import annotations


def with_files(words: list[str]) -> list[str]:
    """The words of the command line with the files among them, which have no key, as one setting.

    Example:
        >>> print(*with_files(["ckpt=best.ckpt", "a.wav", "it's.wav"]))
        ckpt=best.ckpt files=['a.wav','it\\'s.wav']
    """
    from pathlib import Path

    names = [word for word in words if "=" not in word or Path(word).is_file()]
    if not names:
        return words
    listed = ",".join("'" + name.replace("\\", "\\\\").replace("'", "\\'") + "'" for name in names)
    return [*(word for word in words if word not in names), f"files=[{listed}]"]


def run(
    *,
    ckpt: str,
    files: list[str] | None = None,
    beam: int = 1,
    nbest: int = 1,
    ema: bool | float = True,
    device: str = "auto",
    trust: list[str] | None = None,
) -> None:
    """Write down what is said in recordings.

    Arguments:
        ckpt: a checkpoint, a run folder, an exported .safetensors, or hf://user/name.
        files: recordings (.wav) of any rate; on the command line simply their names.
        beam: texts kept in the search; 1 takes the most probable character of every frame.
        nbest: texts to print for each file, the most probable first, with their log-probabilities; at most `beam`.
        ema: averaged weights (true), raw ones (false), or the average with one decay.
        device: auto, cpu, cuda, ...
        trust: further packages whose classes the checkpoint may name.
    """
    from genmodels.core.errors import InputError

    if not files:
        raise InputError("name the recordings: genmodels transcribe ckpt=... a.wav b.wav")
    if not 1 <= nbest <= beam:
        raise InputError(f"nbest must lie in 1..beam, got {nbest} with beam={beam}")

    from genmodels.core.checkpoint import verify
    from genmodels.core.files import located
    from genmodels.models.checkpoint import load_model, weights_of

    path = located(ckpt)
    verify(path)
    model, header = load_model(path, device=device, trust=trust or [])
    if not hasattr(model, "transcribe"):
        raise InputError(f"{path} holds a {header['family']}: transcribe is for model=recognizer")
    mels = [recorded(name, model.spec.mel) for name in files]  # all before the first, so that a bad name is seen early
    for name, mel in zip(files, mels, strict=True):
        (found,) = model.transcribe(mel.to(model.device), beam=beam, weights=weights_of(ema))
        for one in found[:nbest]:
            score = "" if nbest == 1 else f" {one.score:.2f}"
            print(f"{name}:{score} {model.written(one)}")


def recorded(name: str, mel: dict):
    """The mel of a sound file as a batch of one.

    Raises:
        InputError: for a file that cannot be read, or is shorter than a frame.
    """
    from genmodels.core.data import Batch
    from genmodels.core.errors import InputError
    from genmodels.speech.audio import AudioError, MelConfig, log_mel, read_wav

    config = MelConfig(**mel)
    try:
        return Batch(log_mel(read_wav(name, config.sample_rate)[0], config)[None].float())
    except (AudioError, ValueError) as error:
        raise InputError(f"{error}" if name in str(error) else f"{name}: {error}") from error
