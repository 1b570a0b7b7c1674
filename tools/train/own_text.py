"""What a target is asked and what of its own text is kept: template, beginnings, held-out prompts, repeats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from random import Random

import numpy as np
import torch

from dflash_local.chat.template import render
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.request import Message
from tools.train.slots import REPEAT, Frame, Opening, Written

# How a question may begin, by kind: what the target is given of its own user's turn. None is the beginning of a prompt
# that is held out, and none names the kind of text that is held out whole (scenes of a play).
SEEDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("seeds.json").read_text(encoding="utf-8"))
# How often each kind is given. Explaining and rewriting are drafted worst: they get more.
SHARES = {"chat": 0.15, "explain": 0.24, "code": 0.12, "arithmetic": 0.11, "list": 0.11, "rewrite": 0.27}
KINDS = (*SEEDS, "free")  # free: the target says what it likes
FREE = 0.25
SHORTEST = 12  # tokens of an answer that is kept


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """A single user turn with the template around it, up to the reply."""
    return list(render(tokenizer, [Message("user", prompt)], thinking=False).ids)


def frame_of(tokenizer: Tokenizer) -> Frame:
    """What the template puts around the user's turn: the ids that two different turns share at both ends."""
    left, right = prompt_ids(tokenizer, "Apples are red."), prompt_ids(tokenizer, "zebras ran 7")
    before = commonprefix([left, right])  # type: ignore[type-var]
    after = commonprefix([left[::-1], right[::-1]])[::-1]  # type: ignore[type-var]
    control = frozenset(token.id for token in tokenizer.added.values() if token.control)
    return Frame(tuple(before), tuple(after), control, frozenset(tokenizer.stop_ids))


def openings(tokenizer: Tokenizer, seed: int, greedy_share: float) -> Iterator[Opening]:
    """Endless beginnings of questions: of a kind by ``SHARES``, or none."""
    draw = Random(seed)
    known = {kind: [tokenizer.encode(text) for text in texts] for kind, texts in SEEDS.items()}
    names, shares = list(SHARES), list(SHARES.values())
    while True:
        greedy = draw.random() < greedy_share
        if draw.random() < FREE:
            yield Opening((), KINDS.index("free"), greedy)
            continue
        kind = draw.choices(names, shares)[0]
        yield Opening(draw.choice(known[kind]), KINDS.index(kind), greedy)


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


def repeat_start(ids: Sequence[int]) -> int:
    """Where ``REPEAT`` tokens begin that stood before; the length where none do. The repeat is no part of a reply."""
    seen: set[tuple[int, ...]] = set()
    for at in range(len(ids) - REPEAT + 1):
        run = tuple(ids[at : at + REPEAT])
        if run in seen:
            return at
        seen.add(run)
    return len(ids)


@dataclass(frozen=True, slots=True)
class Dialogues:
    """Texts one behind the other: ids and the target's likeliest ids [tokens], and of each text [n] its length, where
    the answer starts, its kind's number and whether it is greedy.
    """

    ids: np.ndarray
    best: np.ndarray
    length: np.ndarray
    answer: np.ndarray
    kind: np.ndarray
    greedy: np.ndarray

    @property
    def answer_tokens(self) -> int:
        return int((self.length - self.answer).sum())

    def save(self, file: Path) -> None:
        np.savez(file, **{name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def load(cls, file: Path) -> Dialogues:
        with np.load(file) as found:
            return cls(**{name: found[name] for name in cls.__slots__})


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
        rows = (length[kept], written.answer[kept], written.kind[kept], written.greedy[kept])
        self._parts.append((written.ids[kept][there], written.best[kept][there], *rows))

    def dialogues(self) -> Dialogues:
        ids, best, length, answer, kind, greedy = (torch.cat(part).numpy() for part in zip(*self._parts, strict=True))
        return Dialogues(ids, best, length, answer, kind, greedy)
