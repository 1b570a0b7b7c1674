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
from dflash_local.adapt.drafter_file import LearningDrafter
from dflash_local.adapt.windows import Windows
from dflash_local.engine.runner import ScoringTarget
from dflash_local.store.atomic import write_atomic

DIALOGUES, FEATURES, TABLES = "dialogues.npz", "features.bin", "tables.pt"
HEAD_ROWS = 64  # unit vectors that go through the head at a time


def stored(tensors: Any) -> bytes:
    """Return what torch.save writes of tensors: to a full disk it would write with another error than OSError."""
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class WrittenText:
    """A prompt and the target's greedy reply as ids, and where the reply starts."""

    ids: tuple[int, ...]
    answer: int


class TargetTables:
    """Rows of an embedding for the ids that texts have, and a head: the target's, or the drafter's in their place.

    Attributes:
        head: [vocabulary, w].
    """

    def __init__(self, ids: torch.Tensor, rows: torch.Tensor, head: torch.Tensor) -> None:
        self._ids, self._rows, self.head = ids, rows, head
        self._place = torch.zeros(len(head), dtype=torch.long, device=head.device)
        self._place[ids] = torch.arange(len(ids), device=head.device)

    @classmethod
    @torch.inference_mode()
    def of(cls, target: ScoringTarget, ids: Iterable[int], drafter: LearningDrafter) -> TargetTables:
        """Take what a drafter borrows from a loaded target, whatever its format: the head is what it makes of unit
        vectors. They lie on the host, as a device has no room for another head beside the target.
        """
        wanted = torch.tensor(sorted(set(ids)), device=target.device)
        rows, head = drafter.module.borrowed(target, drafter.files, wanted)
        if head is None:
            units = torch.eye(rows.shape[1], dtype=target.dtype, device=target.device)
            parts = (target.head(part)[:, : target.vocab_size] for part in units.split(HEAD_ROWS))
            head = torch.cat([part.to("cpu", target.dtype) for part in parts]).t().contiguous()
        return cls(wanted.cpu(), rows.to("cpu", target.dtype), head.cpu())

    def save(self, file: Path) -> None:
        write_atomic(file, stored({"ids": self._ids, "rows": self._rows, "head": self.head}))

    @classmethod
    def load(cls, file: Path, device: torch.device) -> TargetTables:
        found = torch.load(file, map_location=device, weights_only=True)
        return cls(found["ids"], found["rows"], found["head"])

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [..., w] of ids [...]."""
        return self._rows[self._place[ids]]


class KeptTexts:
    """Texts in a folder as ``adapt.trainer.Teacher``."""

    def __init__(self, folder: Path, tables: TargetTables) -> None:
        self.dialogues, self._tables = Dialogues.load(folder / DIALOGUES), tables
        self.head, self.device, self.dtype = tables.head, tables.head.device, tables.head.dtype
        tokens, width = len(self.dialogues.ids), self.head.shape[1]
        flat = torch.from_file(str(folder / FEATURES), size=tokens * width, dtype=self.dtype)
        self._features = flat.view(tokens, width)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``adapt.trainer.Teacher``."""
        return self._tables.embed(ids)

    def taps_of(self, windows: Windows, layers: Sequence[int]) -> torch.Tensor:
        """Return what ``fc`` has made of them, as it is never trained: the drafter's own is left out."""
        return self._features[windows.at.cpu()].to(self.device)


@torch.inference_mode()
def keep_texts(
    folder: Path, texts: Sequence[WrittenText], longest: int, target: ScoringTarget, fc: torch.Tensor
) -> Iterator[int]:
    """Write texts and the features of their last ``longest`` tokens to a folder; yields how many of them are done.

    Args:
        fc: the drafter's [w, layers x w of the target], on the device of the target.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = [text.ids[-longest:] for text in texts]
    with (folder / FEATURES).open("wb") as file:
        for number, text in enumerate(texts, 1):
            target.clear()
            ids, rows = torch.tensor(text.ids, device=target.device), []
            for chunk in ids.split(target.prefill_chunk):
                taps = target.prefill(chunk, True).taps
                assert taps is not None
                rows.append((taps.to(fc.dtype) @ fc.t()).to(target.dtype))
            features = torch.cat(rows)[-longest:].cpu().contiguous()
            file.write(features.view(torch.uint8).numpy().tobytes())
            yield number
    flat = np.array([each for ids in kept for each in ids])
    length = np.array([len(ids) for ids in kept])
    answer = np.array([text.answer - (len(text.ids) - len(ids)) for text, ids in zip(texts, kept, strict=True)])
    Dialogues(flat, flat, length, answer.clip(0)).save(folder / DIALOGUES)
    target.clear()
