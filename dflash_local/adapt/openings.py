"""What a target is asked when it writes its own text: beginnings of questions, and the template around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from random import Random

from dflash_local.chat.template import render
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.json_text import parse_json
from dflash_local.request import Message

# How a question may begin, by kind: what the target is given of its own user's turn. None is the beginning of a prompt
# that is held out, and none names the kind of text that is held out whole (scenes of a play).
SEEDS: dict[str, list[str]] = parse_json(Path(__file__).with_name("seeds.json").read_text(encoding="utf-8"))
# How often each kind is given. Explaining and rewriting are drafted worst: they get more.
SHARES = {"chat": 0.15, "explain": 0.24, "code": 0.12, "arithmetic": 0.11, "list": 0.11, "rewrite": 0.27}
KINDS = (*SEEDS, "free")  # free: the target says what it likes
FREE = 0.25


@dataclass(frozen=True, slots=True)
class Opening:
    """How a dialogue begins: ids of the question so far (none: the target says what it likes), its number of a kind,
    whether the answer is greedy, and its temperature otherwise.
    """

    ids: Sequence[int]
    kind: int = 0
    greedy: bool = True
    temperature: float = 0.7


@dataclass(frozen=True, slots=True)
class Frame:
    """Ids around the user's turn: ``before`` it, and from its end to the reply (``after``); ``special`` ids end a
    question, ``stop`` ids a reply.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    special: frozenset[int]
    stop: frozenset[int]


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
