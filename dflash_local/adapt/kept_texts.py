"""What a drafter learns from, on disk: a target's texts, what its drafter's ``fc`` made of their taps, and its head."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_local.adapt.dialogues import Dialogues
from dflash_local.adapt.windows import Windows
from dflash_local.bench.report import Progress
from dflash_local.drafters.dflash.training import DraftModule
from dflash_local.engine.runner import ScoringTarget
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.store.atomic import write_atomic

DIALOGUES, FEATURES = "dialogues.npz", "features.bin"
ROWS, HEAD, TABLES = "rows.bin", "head.bin", "tables.pt"
TOGETHER = 64  # rows of an embedding, and columns of a head, that are made at a time


def stored(tensors: Any) -> Sequence[memoryview]:
    """Return what torch.save writes of tensors, for ``write_atomic``.

    torch.save into a file raises RuntimeError where the disk is full, not OSError.
    """
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return (buffer.getbuffer(),)


@dataclass(frozen=True, slots=True)
class WrittenText:
    """A prompt and the target's greedy reply as ids, and where the reply starts."""

    ids: tuple[int, ...]
    answer: int


class TargetTables:
    """Rows of an embedding for the ids that texts have, on the host, and a head: the target's, or the drafter's in
    their place.

    Args:
        ids: [n], of the rows [n, w].

    Attributes:
        head: [vocabulary, w].
    """

    def __init__(self, ids: torch.Tensor, rows: torch.Tensor, head: torch.Tensor) -> None:
        self._rows, self.head = rows, head
        self._place = torch.zeros(len(head), dtype=torch.long)
        self._place[ids] = torch.arange(len(ids))

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> TargetTables:
        found = torch.load(folder / TABLES, map_location="cpu", weights_only=True)
        ids, like = found["ids"], found["like"]
        width = (folder / HEAD).stat().st_size // (like.shape[1] * like.itemsize)
        head = _mapped(folder / HEAD, width, like).t()
        return cls(ids, _mapped(folder / ROWS, len(ids), head), head.to(device))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [..., w] of ids [...]."""
        return self._rows[self._place[ids.cpu()]].to(self.head.device)


class KeptTexts:
    """Texts as ``adapt.trainer.Teacher``. ``features``: what ``fc`` made of their taps, [tokens, w] on the host."""

    def __init__(self, features: torch.Tensor, tables: TargetTables) -> None:
        self._features, self._tables = features, tables
        self.head, self.device, self.dtype = tables.head, tables.head.device, tables.head.dtype

    @classmethod
    def open(cls, folder: Path, tables: TargetTables, tokens: int) -> KeptTexts:
        """Take so many tokens of a folder."""
        return cls(_mapped(folder / FEATURES, tokens, tables.head), tables)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``adapt.trainer.Teacher``."""
        return self._tables.embed(ids)

    def taps_of(self, windows: Windows, layers: Sequence[int]) -> torch.Tensor:
        """Return what ``fc`` has made of them, as it is never trained: the drafter's own is left out."""
        return self._features[windows.at.cpu()].to(self.device)


def _mapped(file: Path, rows: int, like: torch.Tensor) -> torch.Tensor:
    """Return rows of a file that are read where they are used, as wide as ``like`` [n, w] and of its dtype."""
    width = like.shape[1]
    return torch.from_file(str(file), size=rows * width, dtype=like.dtype).view(rows, width)


def _bytes(rows: torch.Tensor) -> memoryview:
    return rows.cpu().contiguous().view(torch.uint8).numpy().data


@torch.inference_mode()
def keep_tables(
    folder: Path, ids: Iterable[int], target: ScoringTarget, module: DraftModule, files: Checkpoint
) -> None:
    """Write what a drafter borrows from a loaded target, whatever its format: the head is what it makes of unit
    vectors, a column of it of each. All is made and written in pieces: there is no room for another head beside the
    target.
    """
    wanted, width = torch.tensor(sorted(set(ids))), module.config.hidden_size
    embed, own = module.borrowed(target, files)
    rows = (_bytes(embed(part.to(target.device)).to(target.dtype)) for part in wanted.split(TOGETHER))
    write_atomic(folder / ROWS, rows)
    vocab = target.vocab_size if own is None else len(own)
    units = torch.eye(width, dtype=target.dtype) if own is None else own.t()
    parts = units.split(TOGETHER)
    made = parts if own is not None else (target.head(part.to(target.device))[:, :vocab] for part in parts)
    write_atomic(folder / HEAD, map(_bytes, made))
    dtype = target.dtype if own is None else own.dtype
    write_atomic(folder / TABLES, stored({"ids": wanted, "like": torch.empty(0, vocab, dtype=dtype)}))


@torch.inference_mode()
def keep_texts(
    folder: Path,
    texts: Sequence[WrittenText],
    longest: int,
    target: ScoringTarget,
    fc: torch.Tensor,
    progress: Progress,
) -> None:
    """Write texts and the features of their last ``longest`` tokens to a folder.

    Args:
        fc: the drafter's [w, layers x w of the target], on the device of the target and of its dtype.
    """
    write_atomic(folder / FEATURES, _features(texts, longest, target, fc, progress))
    kept = [text.ids[-longest:] for text in texts]
    flat = np.array([each for ids in kept for each in ids])
    length = np.array([len(ids) for ids in kept])
    answer = np.array([text.answer - (len(text.ids) - len(ids)) for text, ids in zip(texts, kept, strict=True)])
    Dialogues(flat, flat, length, answer.clip(0)).save(folder / DIALOGUES)
    target.clear()


def _features(
    texts: Sequence[WrittenText], longest: int, target: ScoringTarget, fc: torch.Tensor, progress: Progress
) -> Iterator[memoryview]:
    for number, text in enumerate(texts, 1):
        target.clear()
        left_out = max(0, len(text.ids) - longest)
        for chunk in torch.tensor(text.ids, device=target.device).split(target.prefill_chunk):
            taps = target.prefill(chunk, True).taps
            assert taps is not None
            if left_out < len(chunk):
                yield _bytes(taps[left_out:] @ fc.t())
            left_out = max(0, left_out - len(chunk))
        progress(f"keeping taps, text {number} of {len(texts)}", number / len(texts))
