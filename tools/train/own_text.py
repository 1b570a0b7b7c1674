"""What of a target's own text is kept: no held-out prompts, no repeats."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dflash_local.adapt.dialogues import Dialogues, repeat_start
from dflash_local.chat.tokenizer import Tokenizer
from tools.train.slots import Written

SHORTEST = 12  # tokens of an answer that is kept


def words(text: str) -> tuple[str, ...]:
    """Lower-case words without punctuation around them."""
    return tuple(word for word in (each.strip(".,:;!?\"'()*`") for each in text.lower().split()) if word)


class HeldOutFilter:
    """Tells the questions that contain a held-out prompt, whatever their case, spaces and punctuation."""

    def __init__(self, prompts: Iterable[str]) -> None:
        self._prompts = [f" {' '.join(words(prompt))} " for prompt in prompts]

    def contains(self, question: str) -> bool:
        found = f" {' '.join(words(question))} "
        return any(prompt in found for prompt in self._prompts)


class Keeper:
    """Gathers what is trained on of what slots wrote, on the CPU, while the next steps run.

    Attributes:
        counts: dialogues that came, and how many were dropped or cut for what.
    """

    def __init__(self, tokenizer: Tokenizer, held_out: HeldOutFilter) -> None:
        self._bytes = [tokenizer.token_bytes(token) or b"" for token in range(tokenizer.vocab_size)]
        self._held_out = held_out
        self._parts: list[tuple[torch.Tensor, ...]] = []
        self.counts = {"dialogues": 0, "held_out": 0, "short": 0, "cut_at_a_repeat": 0}

    def add(self, written: Written) -> None:
        places = zip(written.ids, written.answer, written.length)
        told = torch.tensor([repeat_start(ids[answer:end].tolist()) for ids, answer, end in places])
        length, kept = written.answer + told, told >= SHORTEST
        self.counts["dialogues"] += len(kept)
        self.counts["short"] += int((~kept).sum())
        self.counts["cut_at_a_repeat"] += int((length < written.length).sum())
        for row in kept.nonzero().flatten().tolist():
            asked = written.ids[row, int(written.question[row]) : int(written.answer[row])].tolist()
            if self._held_out.contains(b"".join(self._bytes[token] for token in asked).decode("utf-8", "replace")):
                kept[row] = False
                self.counts["held_out"] += 1
        there = torch.arange(written.ids.shape[1]) < length[kept].unsqueeze(1)
        rows = (length[kept], written.answer[kept])
        self._parts.append((written.ids[kept][there], written.best[kept][there], *rows))

    def dialogues(self) -> Dialogues:
        return Dialogues(*(torch.cat(part).numpy() for part in zip(*self._parts, strict=True)))
