"""A speech recogniser as a model: p(text | mel), a sum over all alignments."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.core.likelihood import Likelihood
from genmodels.core.processes import gather
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import Samples, SamplingOptions
from genmodels.models.base import GenerativeModel, Loss
from genmodels.models.build import construct
from genmodels.models.mels import MelUnits
from genmodels.models.optimizer import Optimizer
from genmodels.nn.recognizer import SpeechEncoder
from genmodels.speech.decoding import Hypothesis
from genmodels.speech.recognition import Edits, character_edits, pooled
from genmodels.speech.text import Symbols
from genmodels.speech.transducer import CTC, least_frames

_SHOWN = 8  # texts written while training


def characters(batch: Batch) -> tuple[Tensor, Tensor]:
    """The texts of a batch as classes `(B, N)`, 0 beyond their ends, and their lengths `(B,)`.

    Padding and blanks of the table are left out: class k is its symbol k + 1, and class 0 is free for a blank.

    Example:
        >>> from genmodels.core.data import TextCondition
        >>> said = TextCondition(torch.tensor([[1, 5, 1, 3, 1], [1, 7, 1, 0, 0]]), torch.ones(2, 1, 5).bool())
        >>> characters(Batch(torch.zeros(2, 1, 1), said))
        (tensor([[4, 2],
                [6, 0]]), tensor([2, 1]))
    """
    tokens = batch.cond.tokens
    said = (tokens > 1) & batch.cond.mask[:, 0]
    counts = said.sum(1)
    order = (~said).long().argsort(dim=1, stable=True)[:, : int(counts.max())]
    beyond = torch.arange(order.shape[1], device=tokens.device) >= counts[:, None]
    return (tokens.gather(1, order) - 1).masked_fill(beyond, 0), counts


class RecognizerCore(nn.Module):
    """The encoder of a recogniser, and what makes probabilities of texts out of its frames.

    Arguments:
        net: the encoder.
        ctc: its output by connectionist temporal classification.
    """

    def __init__(self, net: SpeechEncoder, ctc: CTC):
        super().__init__()
        self.net, self.ctc = net, ctc


class Recognizer(GenerativeModel):
    """Mel to text: the probability of a text given a mel, summed over their alignments.

        log p(text | mel) = log sum over paths that collapse to the text of prod_t p(k_t | h_t),    h = encoder(mel)
        loss = -log p(text | mel) / characters

    Its likelihood is one of texts, in bits per character, and stands in tables with those of mels, ranked apart; it
    makes no samples of mels, but transcripts: `transcribe`.

    Arguments:
        spec: the data set this model is built for, mels with texts.
        net: options of the encoder.
        optimizer: options of the optimiser.
        ema_decay: decay of the averaged weights, or several, 0 for none.

    Raises:
        InputError: for data without texts or without mels, and options that the encoder refuses.

    Example:
        >>> from genmodels.speech.text import CHARACTERS
        >>> text = {"symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": ["hello"]}
        >>> spec = DataSpec("speech", (4, 40), mel={}, statistics={"mean": -5.0, "std": 2.0}, text=text)
        >>> model = Recognizer(spec, net={"channels": 8, "depth": 1, "heads": 2, "hidden": 8}).eval()
        >>> len(model.transcribe(Batch(torch.zeros(2, 4, 12)), beam=4)[0])
        4
    """

    family = "recognizer"
    takes_text = True
    generates = False

    def __init__(
        self,
        spec: DataSpec,
        *,
        net: SpeechEncoder | dict | None = None,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.999,
    ):
        super().__init__(spec)
        self.save_hyperparameters(ignore=["spec"], logger=False)
        if spec.text is None:
            raise InputError(f"{spec.name} has no texts: model={self.family} is for data=speech with texts")
        self.units = MelUnits(spec, noise=0.0)
        self.symbols = Symbols(tuple(spec.text["symbols"]), blanks=False)
        if not isinstance(net, SpeechEncoder):
            net = construct(SpeechEncoder, spec.event_shape[0], **(net or {}))
        self.core = RecognizerCore(net, CTC(net.channels, len(self.symbols) - 1))
        self._heard: list[Edits] = []
        self.finish_setup(optimizer, ema_decay)

    @property
    def modelled(self) -> DataSpec:
        """Its texts, as sequences of characters."""
        return DataSpec(self.spec.name, (1,), levels=len(self.symbols), encoding="characters")

    # ---- the contract -------------------------------------------------------------------------------------------

    def encode(self, batch: Batch, core: RecognizerCore) -> tuple[Tensor, Tensor]:
        """The frames `(B, C, T)` of an encoder for a batch, and how many there are, `(B,)`."""
        index = batch.item_index
        u, _ = self.units(batch, KeyedGenerator(0, index, "units"))  # its noise has width 0
        h, mask = core.net(u, batch.mask)
        frames = torch.full_like(index, h.shape[2]) if mask is None else mask.sum((1, 2))
        return h, frames

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """Nats per character.

        Raises:
            InputError: for a text that has more characters than its mel has frames, naming the item.
        """
        y, counts = characters(batch)
        h, frames = self.encode(batch, self.core)
        self._require_room(batch, y, counts, frames)
        nll = -self.core.ctc.log_prob(h, frames, y, counts) / counts
        return Loss(nll.mean(), nll, {"ctc": nll.detach()})

    def _require_room(self, batch: Batch, y: Tensor, counts: Tensor, frames: Tensor) -> None:
        needed = least_frames(y, counts)
        short = (needed > frames).nonzero().flatten().tolist()
        if short:
            k, factor = short[0], self.core.net.subsampling
            raise InputError(
                f"item {int(batch.item_index[k])} of {self.spec.name} needs {int(needed[k])} frames for its "
                f"{int(counts[k])} characters, and has {int(frames[k])} of {factor} frames of its mel: "
                f"{'use model.net.subsampling=2, or ' if factor == 4 else ''}leave it out of the data")

    @torch.no_grad()
    def log_likelihood(self, batch: Batch, *, weights: str | float = "ema", seed: int = 0) -> Likelihood:
        """log p(text | mel), exact; minus infinity for texts with more characters than frames.

        Arguments:
            batch: items in the data's own units.
            weights: `ema`, `raw`, or one of the decays kept.
            seed: unused, nothing is drawn.
        """
        core = self.weights(weights)
        y, counts = characters(batch)
        h, frames = self.encode(batch, core)
        nats = core.ctc.log_prob(h, frames, y, counts)
        made = {"estimate": "sum over alignments", "weights": str(weights), "given": "mel"}
        return Likelihood(nats, "exact", counts, len(self.symbols), None, made, batch.item_index)

    @torch.no_grad()
    def transcribe(
        self, batch: Batch, *, beam: int = 1, weights: str | float = "ema"
    ) -> list[list[Hypothesis]]:
        """The texts of mels, for each the most probable first.

        Arguments:
            batch: mels in the data's own units; texts that come with them are not looked at.
            beam: texts kept in the search; 1 takes the most probable character of every frame.
            weights: `ema`, `raw`, or one of the decays kept.

        Raises:
            InputError: for a beam below 1.
        """
        if beam < 1:
            raise InputError(f"beam must be at least 1, got {beam}")
        core = self.weights(weights)
        return core.ctc.search(*self.encode(batch, core), beam)

    def written(self, found: Hypothesis) -> str:
        """A hypothesis in characters."""
        return self.symbols.decode([k + 1 for k in found.tokens])

    def said(self, batch: Batch) -> list[str]:
        """The texts that come with a batch, in characters."""
        y, counts = characters(batch)
        return [self.symbols.decode((row[:n] + 1).tolist()) for row, n in zip(y, counts.tolist(), strict=True)]

    def draw(self, options: SamplingOptions) -> Samples:
        """A recogniser makes no mels.

        Raises:
            InputError: always.
        """
        raise InputError("a recognizer has no samples, it writes down what is said: genmodels transcribe ckpt=... "
                         "files")

    # ---- what is seen of it while it trains ---------------------------------------------------------------------

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The likelihood of a validation batch under the averaged weights, and the edits of its transcripts."""
        super().validation_step(batch, batch_idx)
        self._heard += [character_edits(said, self.written(found[0]))
                        for said, found in zip(self.said(batch), self.transcribe(batch), strict=True)]

    def log_validation(self, result: Likelihood) -> None:
        """Bits per character, and the CER of greedy transcripts."""
        super().log_validation(result)
        edits, self._heard = gather(self._heard), []
        self.figures["val/cer"] = pooled(edits).rate
        self.log("val/cer", self.figures["val/cer"], rank_zero_only=False)

    def transcripts(self) -> str:
        """What is said in a few validation items, and what is heard."""
        loader = self.trainer.val_dataloaders
        batch = next(iter(loader)).rows(slice(0, _SHOWN)).to(self.device)
        self.core.eval()  # the caller puts the mode back
        pairs = zip(self.said(batch), self.transcribe(batch), strict=True)
        return "\n\n".join(f"said:  {said}\nheard: {self.written(found[0])}" for said, found in pairs)
