"""A corpus of synthetic speech: sentences read by an installed text-to-speech program, in LJSpeech's layout."""

from __future__ import annotations

import ast
import functools
import hashlib
import random
import re
import shutil
import subprocess
import sysconfig
import tempfile
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from genmodels.core.errors import InputError, RunError, as_input_errors, one_of, progress_bar
from genmodels.core.files import read_text, write_whole
from genmodels.speech.audio import AudioError, read_wav, write_wav
from genmodels.speech.text import normalise, sentences

RATE = 16000


@dataclass(frozen=True)
class Voice:
    """A voice of a text-to-speech program.

    Attributes:
        command: with {text} and {out}; the text is also passed by standard input.
        packages: of Debian, with the program and the voice.
        licence: a sentence on the licence of its sound.
    """

    command: tuple[str, ...]
    packages: str
    licence: str


_CARNEGIE_MELLON = "Its licence is Carnegie Mellon University's, free for any use with its notice."


def _flite(name: str) -> Voice:
    return Voice(("flite", "-voice", name, "-t", "{text}", "-o", "{out}"), "flite", _CARNEGIE_MELLON)


VOICES = {
    **{name: _flite(name) for name in ("slt", "rms", "awb", "kal16")},
    "slt_hts": Voice(("text2wave", "-eval", "(voice_cmu_us_slt_arctic_hts)", "-o", "{out}"),
                     "festival festvox-us-slt-hts", _CARNEGIE_MELLON),
    "espeak": Voice(("espeak-ng", "-v", "en-us", "-w", "{out}", "--stdin"), "espeak-ng",
                    "Its program is under the GPL 3, which does not extend to the sound."),
}


_TIMEOUT = 120.0  # seconds in which a program must make a clip of a few seconds


def corpus(
    out: Path, texts: Sequence[str], voice: str = "rms", *, workers: int = 1, progress: bool = False
) -> list[float]:
    """Write `metadata.csv` and `wavs/` of texts read by a voice, at 16 kHz; existing clips are kept.

    A clip is named after its voice and text, so that the same call resumes a killed one, and more texts can be added.
    The voice reads the normal form of a text, numbers in words, which is the third field of its row.

    Arguments:
        out: the folder.
        texts: the texts, equal ones once.
        voice: one of `VOICES`.
        workers: programs running at the same time; the result does not depend on it.
        progress: show a progress bar.

    Returns the seconds of every clip, in the order of the rows.

    Raises:
        InputError: for an unknown voice, a program that is not installed, a text without a letter that can be read, a
            folder that lists clips of another voice or text.
        RunError: if the program fails, or gives no sound.
    """
    check_voice(voice)
    with as_input_errors():
        written = [" ".join(text.replace("|", ", ").split()) for text in texts]
        rows = dict(zip(map(normalise, written), written, strict=True))
    for said, text in rows.items():
        if not any("a" <= c <= "z" for c in said.lower()):
            raise InputError(f"there is no English letter in {text!r}: leave it out of the text")
    names = {said: f"{voice}-{hashlib.blake2b(said.encode(), digest_size=6).hexdigest()}" for said in rows}
    with suppress(FileNotFoundError):
        rows_there = (out / "metadata.csv").read_text(encoding="utf-8-sig", errors="replace").splitlines()
        listed = (row.split("|")[0] for row in rows_there if row.strip())
        others = sorted(set(listed) - set(names.values()))
        if others:
            raise InputError(f"{out} lists {len(others)} clips that are not of this voice and these texts, such as "
                             f"{others[0]}: give another out=, or no smaller n=")
    pool = ThreadPoolExecutor(workers)
    try:
        places = (out / "wavs" / f"{name}.wav" for name in names.values())
        made = pool.map(functools.partial(_clip, voice), names, places)
        seconds = list(progress_bar(made, desc=f"voice {voice}", unit="clip", total=len(names), disable=not progress))
    finally:
        pool.shutdown(cancel_futures=True)  # clips that are being made are finished
    lines = "".join(f"{name}|{rows[said]}|{said}\n" for said, name in names.items())
    write_whole(out / "metadata.csv", lambda file: file.write(lines), mode="w")
    return seconds


def check_voice(voice: str) -> None:
    """Raise InputError for a voice that is unknown, or whose program is not installed."""
    one_of("voice", voice, VOICES)
    program = VOICES[voice].command[0]
    if shutil.which(program) is None:
        here = ", ".join(name for name, each in VOICES.items() if shutil.which(each.command[0]))
        raise InputError(f"voice={voice} needs the program {program}: apt-get install {VOICES[voice].packages}"
                         + (f", or give a voice whose program is installed: {here}" if here else ""))


def _clip(voice: str, said: str, place: Path) -> float:
    """The seconds of a clip, which is made unless it exists and is readable."""
    try:
        wave, rate = read_wav(place)
        if rate == RATE:
            return len(wave) / RATE
    except AudioError:  # not there, or damaged
        pass
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "said.wav"
        command = [part.format(text=said, out=made) for part in VOICES[voice].command]
        try:
            done = subprocess.run(command, input=said, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
            if done.returncode:
                raise AudioError(f"exit code {done.returncode}: {' '.join(done.stderr.split())[:200]}")
            wave, _ = read_wav(made, RATE)
            if not bool(wave.any()):
                raise AudioError("its sound is silence")
        except (AudioError, subprocess.TimeoutExpired) as error:
            raise RunError(f"{command[0]} cannot read {said!r} with voice {voice}: {error}") from error
    write_whole(place, lambda file: write_wav(file, wave, RATE))
    return len(wave) / RATE


def sentences_of(file: Path, longest: int = 100) -> list[str]:
    """The sentences of a text file, each of at most `longest` characters.

    Paragraphs end at empty lines; without empty lines every line is a paragraph.

    Raises:
        InputError: for a file that cannot be read, or has no letters.
    """
    whole = read_text(file, "text").strip()
    parts = re.split(r"\n\s*\n", whole) if re.search(r"\n\s*\n", whole) else whole.splitlines()
    found = [one for part in parts for one in sentences(" ".join(part.split()), longest)]
    found = [one for one in found if any(c.isalpha() for c in one)]
    readable = [bool(re.search("[a-z]", unicodedata.normalize("NFKD", one.lower()))) for one in found]
    if not any(readable):
        raise InputError(f"text={file} has no sentences in the Latin alphabet")
    if not all(readable):
        warnings.warn(f"left out {readable.count(False)} of {len(found)} sentences without a Latin letter, such as "
                      f"{found[readable.index(False)]!r}", stacklevel=2)
    return [one for one, kept in zip(found, readable, strict=True) if kept]


def default_sentences(n: int) -> list[str]:
    """n different sentences of 18 to 70 characters, the same for the same version of Python.

    Every third is made of the words below, with numbers and names; the others come from `documentation` until it ends.
    A longer list begins with the shorter one.
    """
    own, documented = made_sentences(), iter(documentation())
    found: dict[str, None] = {}
    for number in count():
        if len(found) == n:
            return list(found)
        found[next(own) if number % 3 == 0 else next(documented, None) or next(own)] = None


_READABLE = re.compile(r"[A-Za-z][A-Za-z' ,;:.?!-]{17,69}")
#: Parts of code: quotes, single letters, capitals within words, words of consonants.
_CODE = re.compile(r"(?<![a-z])'|'(?![a-z])|\b[b-zB-HJ-Z]\b|[a-z][A-Z]|[A-Z]{2}|[.,:;-][.,:;-]|\.[a-zA-Z]|- | -|"
                   r"[^aeiouyAEIOUY\W]{5}")


@functools.cache
def documentation() -> tuple[str, ...]:
    """Sentences and clauses of the docstrings of Python's standard library that read as prose, in a shuffled order."""
    root, found = Path(sysconfig.get_path("stdlib")), set()
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if {"site-packages", "dist-packages"} & set(parts) or any("test" in part for part in parts):
            continue
        try:
            nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        except (OSError, SyntaxError, ValueError):  # templates, and files in other encodings
            continue
        documented = (node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
        for paragraph in re.split(r"\n\s*\n", "\n\n".join(ast.get_docstring(node) or "" for node in documented)):
            clauses = re.split(r"(?<=[.?!:;,])\s+(?=[A-Za-z])", " ".join(paragraph.split()))
            found |= {one for one in clauses if _READABLE.fullmatch(one) and not _CODE.search(one)}
    return tuple(sorted(found, key=lambda one: hashlib.blake2b(one.encode()).digest()))


_NAMES = """Alice Albert Amy Andrew Barbara Bruce Catherine Charles Chloe Daniel Dorothy Edith Edward Emily Eugene
    Fiona Frank George Grace Harold Hannah Hugh Irene Jack Jane Joyce Judith Julia Keith Laura Leonard Lucy Margaret
    Martha Matthew Maurice Naomi Nathan Oliver Olive Oscar Patrick Paul Phoebe Quentin Rachel Roger Ruth Samuel
    Sarah Sheila Sophie Theodore Thomas Ursula Victor Vivian Walter William Yvonne Zachary Zoe""".split()
_SURNAMES = """Abbott Baker Brown Carpenter Chaplin Churchill Cooper Davies Douglas Evans Fisher Fletcher Foster
    Gardner Griffith Harvey Hughes Jefferson Johnson Joyce Kennedy Lawrence Lloyd Mitchell Moore Newton Owen Parker
    Powell Quincy Reynolds Shepherd Smith Taylor Thatcher Turner Usher Vaughan Walker Watson Young""".split()
_PLACES = """Africa Amsterdam Athens Australia Baltimore Belgium Boston Brazil Cairo Canada Chicago Denver Detroit
    Dublin Edinburgh Egypt England Florence France Geneva Georgia Greece Houston Iceland Ireland Italy Jamaica Japan
    Kansas Kenya London Madrid Memphis Mexico Montreal Moscow Naples Norway Ohio Oxford Paris Peru Prague Quebec
    Rome Russia Scotland Seattle Shanghai Spain Sweden Sydney Texas Tokyo Toronto Venice Vienna Virginia Wales
    Warsaw Zurich""".split()
_THINGS = """apple arrow badge basket beach bicycle blanket boat book bottle boy branch bridge brush building button
    cabin candle carriage castle chain chair cheese cherry child church cloud coat coin collar corner cottage couch
    cow cradle cup curtain daughter desk diamond doctor dog door dragon drawer earth edge elephant engine eye father
    feather fence finger flower forest fork fountain fox garage garden gate ghost giraffe glove hammer harbor hat
    hedge horse house island jacket jewel journey judge kitchen kitten knife ladder lamp leather lemon letter
    library lion machine measure meadow merchant mirror moon mountain mouth needle oil onion orange oven oyster
    package palace pencil piano picture pillow pocket poem potato prince puzzle queen rabbit ribbon river road roof
    rope sailor school shadow sheep ship shoe shoulder soldier song spoon stone storm sugar teacher temple theatre
    thread thumb tiger toy treasure tree trousers umbrella valley village violin voice wagon watch water weather
    whistle window wolf woman yard yellow zebra""".split()
_KINDS = """ancient angry bitter blue bright broad broken cheap clean clever cold curious dark deep dirty dusty
    early empty enormous faithful famous foolish fresh gentle golden gray green happy heavy hollow honest huge
    hungry joyful large lazy little lonely long loud lovely narrow noisy old pale pleasant poor precious proud quick
    quiet red rough round royal rusty sharp short silent silver smooth soft sour strange strong sudden sweet tall
    thick thin tiny ugly unusual useful various warm weak white wide wild wise wooden yellow young""".split()
_DEEDS = """admired answered borrowed bought broke brought built buried carried caught chose cleaned counted covered
    crushed described drew dropped enjoyed examined fetched followed found gathered guarded hid imagined joined kept
    lifted lost loved measured mentioned missed moved noticed offered opened ordered painted polished promised
    pulled pushed raised remembered repaired saved searched sold stole studied threw touched treasured used valued
    visited washed watched wanted weighed""".split()
_WAYS = """again, alone, always, badly, beneath the bridge, by the fire, early, every Thursday, gladly, in the
    morning, in vain, last Wednesday, later this year, near the church, never, on the beach, outside, quickly,
    quietly, slowly, this afternoon, together, tomorrow, twice, with great pleasure, without a word, yesterday"""
_MONTHS = "January February March April May June July August September October November December".split()


_UNITS = "books, coins, days, dollars, hours, letters, miles, minutes, months, pages, people, pounds, steps, years"


def made_sentences() -> Iterator[str]:
    """An endless stream of sentences, with numbers, names and all phonemes of English; some may be equal.

    Example:
        >>> next(made_sentences())
        "Their red shoulder was as long as Ursula's sugar."
    """
    ways, units = ([" ".join(part.split()) for part in words.split(",")] for words in (_WAYS, _UNITS))
    for number in count():
        draw = random.Random(number)
        (name, friend), (other, place, day) = draw.sample(_NAMES, 2), map(draw.choice, (_SURNAMES, _PLACES, _MONTHS))
        (a, b), (old, new), (did, made) = draw.sample(_THINGS, 2), draw.sample(_KINDS, 2), draw.sample(_DEEDS, 2)
        way, unit, few, many = draw.choice(ways), draw.choice(units), draw.randint(2, 99), draw.randint(100, 9999)
        yield draw.choice((
            f"{name} {did} the {old} {a} {way}.",
            f"The {old} {a} and the {new} {b} {did} nothing.",
            f"Who {did} the {a} from {place}?",
            f"{name} {other} {did} {few} {unit}.",
            f"Where is the {old} {a}, {name}?",
            f"In {draw.randint(1500, 2030)}, {name} {did} a {b}.",
            f"It was {few} {unit} to {place}, not {many}.",
            f"{name} and {friend} {did} the {a}, and {made} the {b}.",
            f"Ask {draw.choice(('Mr.', 'Mrs.', 'Dr.'))} {other} about the {a} for ${many}.",
            f"The {few}th {a} was {old}, but the next was {new}." if few > 20 and few % 10 > 3 else
            f"How {old} the {a} of {friend} {other} is!",
            f"On {day} {draw.randint(4, 19)}th, {name} will be in {place}.",
            f"I {did} it {way}; {few} {unit} are {new} enough.",
            f"Their {old} {b} was as {new} as {name}'s {a}.",
            f"Yes, {few}.{few % 10} percent of the {unit}.",
        ))
