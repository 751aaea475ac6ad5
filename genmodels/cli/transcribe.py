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
    lm: str | None = None,
    lm_order: int = 6,
    lm_weight: float | None = None,
    length: float | None = None,
    times: bool = False,
    stream: bool = False,
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
        lm: a file of texts, one per line, of which a language model of characters is made that helps the search.
        lm_order: characters that it looks at, with the one that it foresees.
        lm_weight: weight of its log-probabilities, 0.3 by default.
        length: exponent of the length normalisation of attention decoders, 0 (none, the default) to 1.
        times: also print when every word begins and ends, in seconds; for models with CTC.
        stream: print what is heard after every chunk of sound; for models with CTC and an attention to chunks.
        ema: averaged weights (true), raw ones (false), or the average with one decay.
        device: auto, cpu, cuda, ...
        trust: further packages whose classes the checkpoint may name.
    """
    from genmodels.core.errors import InputError

    if not files:
        raise InputError("name the recordings: genmodels transcribe ckpt=... a.wav b.wav")
    if not 1 <= nbest <= beam:
        raise InputError(f"nbest must lie in 1..beam, got {nbest} with beam={beam}")
    if lm is not None and beam == 1:
        raise InputError(f"lm={lm} helps a search that keeps several texts: give beam=8 too")
    if lm_weight is not None and lm is None:
        raise InputError(f"lm_weight={lm_weight} needs lm=: give both")
    if stream and (beam > 1 or times):
        raise InputError("stream takes the best path as it comes: leave beam and times out")

    from genmodels.core.checkpoint import verify
    from genmodels.core.errors import refusals
    from genmodels.core.files import located
    from genmodels.models.checkpoint import load_model, weights_of
    from genmodels.speech.decoding import Search

    path = located(ckpt)
    verify(path)
    model, header = load_model(path, device=device, trust=trust or [])
    if not hasattr(model, "transcribe"):
        raise InputError(f"{path} holds a {header['family']}: transcribe is for model=recognizer")
    mels = [recorded(name, model.spec.mel) for name in files]  # all before the first, so that a bad name is seen early
    own = {"weight": lm_weight, "length": length, "language": lm and language_of(model, lm, lm_order)}
    with refusals():
        how = Search(beam=beam, **{key: value for key, value in own.items() if value is not None})
    weights = weights_of(ema)
    for name, mel in zip(files, mels, strict=True):
        mel = mel.to(model.device)
        if stream:
            for text in model.stream(mel, weights=weights):
                print(f"{name}: {text}", flush=True)
            continue
        (found,) = model.transcribe(mel, how, weights=weights)
        for one in found[:nbest]:
            score = "" if nbest == 1 else f" {one.score:.2f}"
            print(f"{name}:{score} {model.written(one)}")
            with refusals():
                spoken = model.times(mel, one, weights=weights) if times else []
            for word, begin, end in spoken:
                print(f"  {begin:7.2f} {end:7.2f} {word}")


def language_of(model, file: str, order: int):
    """A language model of the lines of a file, in the symbols of a recogniser.

    Raises:
        InputError: for a file that cannot be read, or has no text.
    """
    from pathlib import Path

    from genmodels.core.errors import InputError, refusals
    from genmodels.speech.decoding import NGram
    from genmodels.speech.text import in_form

    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"lm={file} cannot be read: {error}") from None
    text, number = model.spec.text, {symbol: k for k, symbol in enumerate(model.symbols.table)}
    with refusals():
        normal = [in_form(line, text.get("form", "characters"), text["language"]) for line in lines
                  if any(c.isalpha() for c in line)]
        texts = [[number[c] - 1 for c in line if c in number] for line in normal]
        if not texts:
            raise InputError(f"lm={file} has no line with letters")
        return NGram(texts, len(number) - 1, order=order)


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
