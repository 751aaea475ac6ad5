"""Slow words: which they are, in letters, numbers and phonemes, over sentences; and what their durations become."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.models.glow_tts import GlowTTS, stream_text
from genmodels.models.text_model import TextReader
from genmodels.speech.text import CHARACTERS, factors_of, normalise, paced, phrases, reopened, without_marks

TEXTS = {  # the words of the normal form with their factors
    "Now [slow]one by one[/slow].": [("now", 1), ("one", 1.5), ("by", 1.5), ("one.", 1.5)],
    "[slow=2]Turn[/slow] right": [("turn", 2), ("right", 1)],
    "at [slow=3]130[/slow] men": [("at", 1), ("one", 3), ("hundred", 3), ("thirty", 3), ("men", 1)],
    "[slow=2]a[/slow] [slow=0.5]b[/slow] c": [("a", 2), ("b", 0.5), ("c", 1)],
    "plain": [("plain", 1)],
}


@pytest.mark.parametrize("text", TEXTS)
def test_factors_of_words(text):
    if any(c.isdigit() for c in without_marks(text)):
        pytest.importorskip("num2words", reason="num2words is not installed")
    expected = [factor for word, factor in TEXTS[text] for _ in range(len(word) + 1)][:-1]
    assert normalise(without_marks(text)) == " ".join(word for word, _ in TEXTS[text])
    assert factors_of(text, normalise) == expected


def test_counting_characters_instead_of_words_is_caught():
    """A mutant: places in the text as written are not those in its normal form."""
    text = "Mr. [slow]White[/slow] left"
    written = [1.5 if "[slow]" in text and 4 <= k < 9 else 1.0 for k in range(len(without_marks(text)))]
    assert factors_of(text, normalise) != written
    assert factors_of(text, normalise) == [1.0] * len("mister ") + [1.5] * len("white ") + [1.0] * len("left")


@pytest.mark.parametrize("text, reason", [
    ("a [slow]b", "not closed"), ("a[/slow] b", "not opened"), ("[slow]a [slow]b[/slow][/slow]", "inside another"),
    ("[slow=0]a[/slow]", "positive number"), ("[slow=fast]a[/slow]", "positive number"),
    ("[slow=1e300]a[/slow]", "0.01 to 100"),
    ("car[slow]pet[/slow]", "whole words"), ("a [slow].[/slow]", "whole words"), ("a [slow]b[/slow=2]", "not opened"),
])  # fmt: skip
def test_marks_that_cannot_be_followed(text, reason, refuses):
    refuses(ValueError, reason, factors_of, text, normalise)


def test_a_mark_around_a_part_of_an_amount(refuses):
    """Normalisation moves words: five million dollars."""
    pytest.importorskip("num2words", reason="num2words is not installed")
    refuses(ValueError, "whole words", factors_of, "$5 [slow]million[/slow] now", normalise)
    whole = factors_of("[slow]$5 million[/slow] now", normalise)
    assert whole == [1.5] * len("five million dollars ") + [1.0] * len("now")
    assert factors_of("Mr[slow]. White[/slow] left", normalise)  # a word that changes where it is


def test_marks_over_sentences():
    whole = "One [slow=2]two. Three, [pause=0.5] four.[/slow] Five."
    found = phrases(whole, 0.2)
    assert found == [("One [slow=2]two.[/slow]", 0.0), ("[slow=2]Three,[/slow]", 0.2), ("[slow=2]four[/slow].", 0.5),
                     ("Five.", 0.2)]  # fmt: skip
    assert all(paced(text) for text, _ in found)
    assert reopened(["a", "b"]) == ["a", "b"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    text = {"symbols": list(CHARACTERS), "blanks": True, "language": "en", "examples": ["hello"]}
    spec = DataSpec("speech", (4, 40), mel={"sample_rate": 22050, "hop": 256}, statistics={"mean": -5.0, "std": 2.0},
                    text=text)  # fmt: skip
    found = GlowTTS(spec, encoder={"channels": 8, "depth": 1, "hidden": 8}, steps=1, hidden=8, depth=1)
    return found


def test_tokens_with_blanks(model):
    reader = TextReader(model.spec)
    stretch = reader.stretch(["a [slow=2]b[/slow]", "ab"])
    assert stretch.tolist()[0] == [1, 1, 1, 1, 2, 2, 2] and stretch.shape == (2, 7)
    assert bool((stretch[1] == 1).all())
    assert reader.stretch(["a b"]) is None
    assert reader(["a [slow=2]b[/slow]"]).tokens.tolist() == reader(["a b"]).tokens.tolist()
    with pytest.raises(InputError, match="whole words"):
        reader.stretch(["ca[slow]b[/slow]"])


MARKED, PLAIN, SLOWLY = "a [slow=2]bad[/slow] cab", "a bad cab", 0.05  # so slowly that whole frames matter little


def durations(model, text, **options):
    return model.sample(1, text=text, **options).durations[0].double()


def test_marked_tokens_last_longer_by_their_factor_and_no_others(model):
    stretch = TextReader(model.spec).stretch([MARKED])[0].double()
    marked, plain = durations(model, MARKED, speed=SLOWLY), durations(model, PLAIN, speed=SLOWLY)
    assert plain.min() > 5
    assert bool(((marked - stretch * plain).abs() <= 1 + stretch).all())
    assert not bool(((marked - plain / stretch).abs() <= 1 + stretch).all())  # a mutant: faster for slower


def test_within_an_exact_time_the_others_make_room(model):
    marked, plain = durations(model, MARKED, seconds=3.2), durations(model, PLAIN, seconds=3.2)
    slow = TextReader(model.spec).stretch([MARKED])[0] == 2
    assert marked.sum() == plain.sum() == 276
    assert marked[slow].sum() > plain[slow].sum() and marked[~slow].sum() < plain[~slow].sum()


def test_in_a_batch_in_a_stream_and_with_given_durations(model):
    alone = durations(model, MARKED, speed=SLOWLY)
    both = model.sample(2, text=[PLAIN, MARKED], speed=SLOWLY).durations[1].double()
    assert both.tolist() == alone.tolist()
    assert stream_text(model, MARKED, speed=SLOWLY).durations == alone.long().tolist()
    given = [2] * len(alone)
    assert durations(model, MARKED, durations=[given]).long().tolist() == given
