"""A speech recogniser as a model: p(text | mel) by CTC, a transducer, or a decoder with attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, check_number, one_of
from genmodels.core.likelihood import Likelihood
from genmodels.core.processes import gather
from genmodels.core.random import KeyedGenerator, uniform
from genmodels.core.samples import Samples, SamplingOptions
from genmodels.data.base import DataModule
from genmodels.data.utterances import FLOOR, Utterances, characters, padded_tokens
from genmodels.models.base import GenerativeModel, Loss
from genmodels.models.build import NETWORKS, TARGET, altered, build, construct
from genmodels.models.mels import MelUnits
from genmodels.models.optimizer import Optimizer
from genmodels.nn.transformer import SpeechEncoder
from genmodels.speech.criteria import CTC, AttentionDecoder, PyramidalLSTM, Transducer, cross_entropy, least_frames
from genmodels.speech.decoding import Hypothesis, Search, collapsed, ctc_alignment, ctc_triggers, expected_errors
from genmodels.speech.recognition import Edits, character_edits, pooled, word_edits
from genmodels.speech.text import Symbols

_SHOWN = 8  # texts written while training
_NAMED = 5  # unusable items named by an error
#: The values of `model.criterion=`.
Criterion = Literal["ctc", "transducer", "attention", "joint"]


class RecognizerCore(nn.Module):
    """The encoder of a recogniser, and the criteria that turn its frames into probabilities of texts.

    Arguments:
        net: the encoder.
        ctc, transducer, decoder: see `genmodels.speech.criteria`; None if not used.
    """

    def __init__(
        self, net: SpeechEncoder | PyramidalLSTM, ctc: CTC | None, transducer: Transducer | None,
        decoder: AttentionDecoder | None,
    ):  # fmt: skip
        super().__init__()
        self.net, self.ctc, self.transducer, self.decoder = net, ctc, transducer, decoder


class Recognizer(GenerativeModel):
    """Mel to text: the probability of a text given a mel.

        ctc          p(y | h) = sum over paths that collapse to y of prod_t p(k_t | h_t),    h = encoder(mel)
        transducer   p(y | h) = sum over alignments, where each character also depends on those before it
        attention    p(y | h) = prod_u p(y_u | y_<u, h)
        joint        loss = -w log p_ctc - (1 - w) log p_attention

    The first three are exact probabilities. The likelihood is that of texts, in bits per character, which tables rank
    separately from those of mels; the model has transcripts (`transcribe`) instead of samples.

    Arguments:
        spec: the data set this model is built for, mels with texts.
        criterion: `ctc`, `transducer`, `attention` or `joint`.
        net: options of the encoder, a `SpeechEncoder`, or of the class that `_target_` names (`model.net=pyramid`: the
            LSTMs of LAS).
        transducer: options of the transducer.
        decoder: options of the attention decoder; its `delay` needs `joint`, which has triggers.
        ctc_weight: w of `joint`, in training and for ranking the texts that a search by CTC proposes.
        smoothing: label smoothing of the attention decoder, the share of its targets spread over all classes.
        sampled: probability that in training the attention decoder reads its own prediction, not the true character.
        mwer: length of the lists for minimum word error rate training, 0 for none; for models that are already trained,
            or with a small learning rate.
        mwer_keep: weight of the usual loss in it.
        gain: most decibels by which each clip is made louder or quieter at random in training; 0 for none. Recordings
            of one studio have one level, and a model of them alone fails on the same speech recorded at another.
        optimizer: options of the optimiser.
        ema_decay: decay of the averaged weights, or several, 0 for none.

    Raises:
        InputError: for data without texts or without mels, and options out of range.

    Example:
        >>> from genmodels.speech.text import CHARACTERS
        >>> text = {"symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": ["hello"]}
        >>> spec = DataSpec("speech", (4, 40), mel={}, statistics={"mean": -5.0, "std": 2.0}, text=text)
        >>> model = Recognizer(spec, net={"channels": 8, "depth": 1, "heads": 2, "hidden": 8}).eval()
        >>> len(model.transcribe(Batch(torch.zeros(2, 4, 12)), Search(beam=4))[0])
        4
    """

    family = "recognizer"
    takes_text = True
    generates = False

    def __init__(
        self,
        spec: DataSpec,
        *,
        criterion: Criterion = "ctc",
        net: SpeechEncoder | PyramidalLSTM | dict | None = None,
        transducer: Transducer | dict | None = None,
        decoder: AttentionDecoder | dict | None = None,
        ctc_weight: float = 0.3,
        smoothing: float = 0.1,
        sampled: float = 0.0,
        mwer: int = 0,
        mwer_keep: float = 0.01,
        gain: float = 20.0,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.999,
    ):
        super().__init__(spec)
        self.save_hyperparameters()
        if spec.text is None:
            raise InputError(f"{spec.name} has no texts: model={self.family} is for data=speech with texts")
        one_of("criterion", criterion, get_args(Criterion))
        spells = ("attention", "joint")
        for name, share, usual, uses in (("ctc_weight", ctc_weight, 0.3, ("joint",)),
                                         ("smoothing", smoothing, 0.1, spells), ("sampled", sampled, 0.0, spells)):
            check_number(name, share, 0, 1)
            if share != usual and criterion not in uses:
                raise InputError(f"model.{name} is for model.criterion={' or '.join(uses)}, not {criterion}")
        check_number("mwer_keep", mwer_keep, 0)
        check_number("gain", gain, 0, 100)
        if mwer < 0 or mwer == 1:
            raise InputError(f"mwer is the length of a list, 2 or more, or 0 for none, got {mwer}")
        self.criterion, self.ctc_weight, self.smoothing, self.sampled = criterion, ctc_weight, smoothing, sampled
        self.mwer, self.mwer_keep, self.gain = mwer, mwer_keep, gain
        self.units = MelUnits(spec, noise=0.0)
        self.symbols = Symbols(tuple(spec.text["symbols"]), blanks=False)
        if not isinstance(net, nn.Module):
            net = {TARGET: "genmodels.nn.transformer.SpeechEncoder", **(net or {})}
            if net[TARGET] in (NETWORKS[name] for name in ("dit", "mlp", "unet")):
                raise InputError(f"{net[TARGET]} is a denoiser: model={self.family} takes model.net=pyramid, or none")
            net = build(net, spec.event_shape[0])
        sizes = (net.channels, len(self.symbols) - 1)
        ctc = CTC(*sizes) if criterion in ("ctc", "joint") else None
        made = {}
        for name, kind, given, uses in (("transducer", Transducer, transducer, ("transducer",)),
                                        ("decoder", AttentionDecoder, decoder, spells)):
            used = criterion in uses
            if not used and (isinstance(given, nn.Module) or given and altered(kind, given)):
                raise InputError(f"model.{name} is for model.criterion={' or '.join(uses)}, not {criterion}")
            own = given if isinstance(given, nn.Module) else construct(kind, *sizes, **(given or {})) if used else None
            made[name] = own
        if made["decoder"] is not None and made["decoder"].delay is not None and ctc is None:
            raise InputError("model.decoder.delay needs triggers, which are learned with model.criterion=joint")
        self.core = RecognizerCore(net, ctc, made["transducer"], made["decoder"])
        self._edits: list[Edits] = []
        self.finish_setup(optimizer, ema_decay)

    @property
    def modelled(self) -> DataSpec:
        """Its texts, as sequences of characters."""
        return DataSpec(self.spec.name, (1,), levels=len(self.symbols), encoding="characters")

    @property
    def writes_words(self) -> bool:
        """Whether its texts are words in letters, not phonemes."""
        return self.spec.text.get("form", "characters") == "characters"

    @property
    def compares_lengths(self) -> bool:
        """Whether its search compares unfinished texts by their decoder, whose scores fall with the length."""
        return self.core.decoder is not None and (self.core.ctc is None or self.core.decoder.delay is not None)

    # ---- the contract -------------------------------------------------------------------------------------------

    def encode(self, batch: Batch, core: RecognizerCore) -> tuple[Tensor, Tensor]:
        """The frames `(B, C, T)` of the encoder for a batch, and their numbers `(B,)`."""
        index = batch.item_index
        u, _ = self.units(batch, KeyedGenerator(0, index, "units"))  # its noise has width 0
        h, mask = core.net(u, batch.mask)
        frames = torch.full_like(index, h.shape[2]) if mask is None else mask.sum((1, 2))
        return h, frames

    def check_items(self, data: DataModule) -> None:
        """Raise InputError for texts that have more characters than their mels have frames, by CTC."""
        short, factor = [], self.core.net.subsampling
        splits = [data.split(name) for name in ("train", "val")] if self.core.ctc is not None else []
        for split in splits:
            if not isinstance(split, Utterances):  # of shards the first such batch is named
                continue
            for item, frames in zip(split.items, (-(-split.frames() // factor)).tolist(), strict=True):
                y = torch.tensor([self.symbols.encode(item.text)])
                needed = int(least_frames(y, torch.tensor([y.shape[1]])))
                if needed > frames:
                    short.append(f"{item.name} ({needed} for {frames})")
        if short:
            more = f", and {len(short) - _NAMED} more" if len(short) > _NAMED else ""
            raise InputError(f"too many characters for CTC in {self.spec.name}, which needs 1 of {factor} frames for "
                             f"each: {', '.join(short[:_NAMED])}{more}: "
                             f"{'use model.net.subsampling=2, or ' if factor > 2 else ''}leave these clips out")

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """Nats per character; with `mwer` the expected number of wrong words plus `mwer_keep` times these.

        Raises:
            InputError: for a text that has more characters than its mel has frames, naming the item.
        """
        core, (y, counts) = self.core, characters(batch)
        h, frames = self.encode(replace(batch, x=self._with_random_gain(batch.x, generator)), core)
        parts: dict[str, Tensor] = {}
        if core.ctc is not None:
            self._require_room(batch, y, counts, frames)
            parts["ctc"] = -core.ctc.log_prob(h, frames, y, counts) / counts
        if core.transducer is not None:
            parts["transducer"] = -core.transducer.log_prob(h, frames, y, counts) / counts
        if core.decoder is not None:
            triggers = None if core.decoder.delay is None else self._aligned(core.ctc.log_probs(h), frames, y, counts)
            log_probs = core.decoder(h, frames, y, counts, triggers=triggers, sampled=self.sampled,
                                     generator=generator.child("sampled"))
            parts["attention"] = cross_entropy(log_probs, y, counts, self.smoothing) / counts
        weights = {"ctc": self.ctc_weight, "attention": 1 - self.ctc_weight} if len(parts) == 2 else {}
        total = sum(weights.get(name, 1.0) * part for name, part in parts.items())
        if self.mwer:
            parts["wrong_words"] = self._expected_errors(batch, h, frames)
            total = parts["wrong_words"] + self.mwer_keep * total
        return Loss(total.mean(), total, {name: part.detach() for name, part in parts.items()})

    def _with_random_gain(self, x: Tensor, generator: KeyedGenerator) -> Tensor:
        """Log-mels of the sounds times random factors; values at the floor stay, as silence does."""
        if self.gain == 0:
            return x
        drawn = uniform((len(x), 1, 1), generator.child("gain"), dtype=x.dtype, device=x.device)
        shift = self.gain / 20 * math.log(10) * (2 * drawn - 1)
        return torch.where(x > FLOOR + 1e-4, x + shift, x).clamp(min=FLOOR)

    @torch.no_grad()
    def _aligned(self, log_probs: Tensor, frames: Tensor, y: Tensor, counts: Tensor) -> Tensor:
        """The first frame (B, N + 1) of every character of the true texts on their most probable paths."""
        spans = [ctc_alignment(own[:n], text[:count].tolist())
                 for own, n, text, count in zip(log_probs, frames.tolist(), y, counts.tolist(), strict=True)]
        return self._padded([[first for first, _ in found] for found in spans], y, log_probs.shape[1])

    def _padded(self, triggers: list[list[int]], y: Tensor, length: int) -> Tensor:
        """Triggers for the characters and ends of texts (B, N), as (B, N + 1), with all frames after the last."""
        found = torch.full((len(y), y.shape[1] + 1), length, device=y.device)
        for row, given in zip(found, triggers, strict=True):
            own = torch.tensor(given[: len(row)], dtype=row.dtype, device=row.device)
            row[: len(own)] = own
        return found

    def _expected_errors(self, batch: Batch, h: Tensor, frames: Tensor) -> Tensor:
        """The expected number of wrong words over the texts of a search, relative to their mean, (B,)."""
        training = self.core.training
        self.core.eval()  # the texts that it would find, without dropout
        with torch.no_grad():
            lists = self._searched(self.core, h, frames, Search(beam=self.mwer))
        self.core.train(training)
        said = self.said(batch)
        errors = torch.zeros(len(lists), self.mwer, dtype=h.dtype, device=h.device)
        texts, absent = [], torch.zeros_like(errors, dtype=torch.bool)
        for k, found in enumerate(lists):
            for n in range(self.mwer):
                one = found[min(n, len(found) - 1)]  # lists of small cases are shorter
                absent[k, n], errors[k, n] = n >= len(found), word_edits(said[k], self.written(one)).total
                texts.append(one.tokens or (0,))
        counts = torch.tensor([0 if text == (0,) else len(text) for text in texts], device=h.device)
        y = padded_tokens(texts)[0].to(h.device)
        rows = h.repeat_interleave(self.mwer, 0), frames.repeat_interleave(self.mwer)
        log_probs = self._log_prob(self.core, *rows, y, counts, None).view_as(errors)
        return expected_errors(log_probs.masked_fill(absent, -torch.inf), errors)

    def _require_room(self, batch: Batch, y: Tensor, counts: Tensor, frames: Tensor) -> None:
        needed = least_frames(y, counts)
        short = (needed > frames).nonzero().flatten().tolist()
        if short:
            k, factor = short[0], self.core.net.subsampling
            raise InputError(
                f"item {int(batch.item_index[k])} of {self.spec.name} needs {int(needed[k])} frames for its "
                f"{int(counts[k])} characters, and has {int(frames[k])} of {factor} frames of its mel: "
                f"{'use model.net.subsampling=2, or ' if factor > 2 else ''}leave it out of the data")

    def _log_prob(
        self, core: RecognizerCore, h: Tensor, frames: Tensor, y: Tensor, counts: Tensor, by: str | None
    ) -> Tensor:
        """log p of texts (B,) by one of the criteria; of two, by attention unless `by` is `ctc`."""
        if core.transducer is not None:
            return core.transducer.log_prob(h, frames, y, counts)
        if core.decoder is None or by == "ctc":
            return core.ctc.log_prob(h, frames, y, counts)
        triggers = None
        if core.decoder.delay is not None:  # of the best path, not of the text: so probabilities of texts sum to one
            triggers = self._padded(ctc_triggers(core.ctc.log_probs(h), frames), y, h.shape[2])
        return core.decoder.log_prob(h, frames, y, counts, triggers)

    @torch.no_grad()
    def log_likelihood(
        self, batch: Batch, *, weights: str | float = "ema", seed: int = 0,
        by: Literal["ctc", "attention"] | None = None,
    ) -> Likelihood:
        """log p(text | mel), exact; by CTC minus infinity for texts with more characters than frames.

        Arguments:
            batch, weights: see `GenerativeModel.log_likelihood`.
            seed: unused, nothing is drawn.
            by: criterion of a `joint` model, by default `attention`, whose probability includes that of the end.

        Raises:
            InputError: for a criterion that the model does not have.
        """
        core = self.weights(weights)
        if (by == "ctc" and core.ctc is None) or (by == "attention" and core.decoder is None):
            raise InputError(f"by={by}: this model has criterion={self.criterion}")
        y, counts = characters(batch)
        nats = self._log_prob(core, *self.encode(batch, core), y, counts, by)
        made = {"estimate": by or self.criterion, "weights": str(weights), "given": "mel"}
        return Likelihood(nats, "exact", counts, len(self.symbols), None, made, batch.item_index)

    @torch.no_grad()
    def transcribe(
        self, batch: Batch, how: Search | None = None, *, weights: str | float = "ema"
    ) -> list[list[Hypothesis]]:
        """The texts of mels, for each the most probable first; texts that differ in spaces at their ends count as one.

        Arguments:
            batch: mels in the data's own units; their texts are not used.
            how: beam, language model, length normalisation; None for a greedy search.
            weights: `ema`, `raw`, or one of the decays kept.
        """
        core = self.weights(weights)
        lists = self._searched(core, *self.encode(batch, core), how or Search())
        texts = ({self.written(one): one for one in reversed(found)} for found in lists)
        return [[one for one in found if one in best.values()] for found, best in zip(lists, texts, strict=True)]

    def _searched(self, core: RecognizerCore, h: Tensor, frames: Tensor, how: Search) -> list[list[Hypothesis]]:
        search = how.first_pass()
        if core.decoder is None:
            return [how.second_pass(found) for found in (core.ctc or core.transducer).search(h, frames, search)]
        if self.compares_lengths:
            triggers = None if core.ctc is None else ctc_triggers(core.ctc.log_probs(h), frames)
            return [how.second_pass(found, how.length) for found in core.decoder.search(h, frames, search, triggers)]
        lists = (how.second_pass(found) for found in core.ctc.search(h, frames, search))
        return [self._rescored(core, h[k : k + 1], frames[k : k + 1], found) for k, found in enumerate(lists)]

    def _rescored(self, core: RecognizerCore, h: Tensor, frames: Tensor, found: list[Hypothesis]) -> list[Hypothesis]:
        """The texts of a search by CTC, best first by w log p(CTC) + (1 - w) log p(decoder) + the language model."""
        if len(found) == 1:
            return found
        counts = torch.tensor([len(one.tokens) for one in found], device=h.device)
        y = padded_tokens([one.tokens or (0,) for one in found])[0].to(h.device)
        many = h.expand(len(found), -1, -1), frames.expand(len(found)), y, counts
        gain = (1 - self.ctc_weight) * (core.decoder.log_prob(*many) - core.ctc.log_prob(*many))
        both = [Hypothesis(one.tokens, one.score + more) for one, more in zip(found, gain.tolist(), strict=True)]
        return sorted(both, key=lambda one: one.score, reverse=True)

    @torch.no_grad()
    def stream(self, batch: Batch, *, weights: str | float = "ema") -> Iterator[str]:
        """The transcript of one mel after every chunk; the last is that of `transcribe`.

        By the best path of CTC, or by the decoder if it has a delay: the characters whose frames have been heard.

        Raises:
            InputError: for a model without CTC, or an encoder that cannot stream.
        """
        core = self.weights(weights)
        if core.ctc is None or core.net.chunk is None:
            raise InputError("stream is for model.criterion=ctc or joint with model.net.attention=xl_chunks or music")
        u, _ = self.units(batch, KeyedGenerator(0, batch.item_index, "units"))
        state, path, heard = None, [], []
        pieces = u.split(core.net.chunk, 2)
        for number, piece in enumerate(pieces, 1):
            h, state = core.net.extend(piece, state)
            path += core.ctc.log_probs(h)[0].argmax(-1).tolist()
            found = Hypothesis(collapsed(path), 0.0)
            if self.compares_lengths:
                heard.append(h)
                found = self._triggered(core, torch.cat(heard, 2), whole=number == len(pieces))
            yield self.written(found)

    def _triggered(self, core: RecognizerCore, h: Tensor, whole: bool) -> Hypothesis:
        """The decoder's best text of the frames heard so far, the characters still to hear left out."""
        frames = torch.tensor([h.shape[2]], device=h.device)
        triggers = ctc_triggers(core.ctc.log_probs(h), frames)
        ready = sum(trigger + core.decoder.delay < h.shape[2] for trigger in triggers[0])
        (found,) = core.decoder.search(h, frames, Search(), triggers, None if whole else ready)
        return found[0]

    @torch.no_grad()
    def times(self, batch: Batch, found: Hypothesis, *, weights: str | float = "ema") -> list[tuple[str, float, float]]:
        """The words of a text of one mel, each with the seconds at which it begins and ends, by CTC.

        Raises:
            InputError: for a model without CTC.
        """
        core = self.weights(weights)
        if core.ctc is None:
            raise InputError(f"times come from the paths of CTC, and this model has criterion={self.criterion}")
        spans = ctc_alignment(core.ctc.log_probs(self.encode(batch, core)[0])[0], found.tokens)
        second = core.net.subsampling * self.spec.mel["hop"] / self.spec.mel["sample_rate"]
        words: list[tuple[str, float, float]] = []
        going_on = False
        for token, (first, last) in zip(found.tokens, spans, strict=True):
            letter = self.symbols.table[token + 1]
            if letter != " ":
                word, begin = words.pop()[:2] if going_on else ("", first * second)
                words.append((word + letter, begin, (last + 1) * second))
            going_on = letter != " "
        return words

    def written(self, found: Hypothesis) -> str:
        """A hypothesis in characters, without spaces at its ends, which no reference has."""
        return self.symbols.decode([k + 1 for k in found.tokens]).strip()

    def said(self, batch: Batch) -> list[str]:
        """The reference texts of a batch, in characters."""
        return [self.symbols.decode((row[:n] + 1).tolist()) for row, n in zip(*characters(batch), strict=True)]

    def draw(self, options: SamplingOptions) -> Samples:
        """A recogniser has no samples.

        Raises:
            InputError: always.
        """
        raise InputError("a recognizer has no samples but transcripts: genmodels transcribe ckpt=... files")

    # ---- validation ---------------------------------------------------------------------------------------------

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The likelihood of a validation batch under the averaged weights, and the edits of its transcripts."""
        super().validation_step(batch, batch_idx)
        if not self.writes_words:
            return
        self._edits += [character_edits(said, self.written(found[0]))
                        for said, found in zip(self.said(batch), self.transcribe(batch), strict=True)]

    def log_validation(self, result: Likelihood) -> None:
        """Bits per character, and the CER of greedy transcripts, which those of phonemes do not have."""
        super().log_validation(result)
        if not self.writes_words:
            return
        edits, self._edits = gather(self._edits), []
        self.figures["val/cer"] = pooled(edits).rate
        self.log("val/cer", self.figures["val/cer"], rank_zero_only=False)

    def transcripts(self) -> str:
        """The texts of a few validation items, and their transcripts."""
        batch = next(iter(self.trainer.val_dataloaders)).rows(slice(0, _SHOWN)).to(self.device)
        self.core.eval()  # the caller restores the mode
        pairs = zip(self.said(batch), self.transcribe(batch), strict=True)
        return "\n\n".join(f"said:  {said}\nheard: {self.written(found[0])}" for said, found in pairs)
