"""The toy's corpus: endless seeded conversations, the held-out split, and the forty held-out prompts."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from tools.train.code_text import class_answer, code
from tools.train.number_text import count_answer, counting, sorting, tables
from tools.train.phrasing import Turn
from tools.train.word_text import dialogue, spelling

KINDS: dict[str, tuple[Callable[[Random], Turn], float]] = {
    "code": (code, 0.24),
    "counting": (counting, 0.17),
    "tables": (tables, 0.15),
    "sorting": (sorting, 0.17),
    "spelling": (spelling, 0.13),
    "dialogue": (dialogue, 0.14),
}
HELDOUT_COUNTS = {"code": 8, "counting": 7, "tables": 7, "sorting": 6, "spelling": 5, "dialogue": 7}

DEMO_PROMPTS: dict[str, tuple[str, str]] = {
    "demo": (
        "Write a Python class Robot with the fields name, speed, weight and owner.",
        class_answer("Robot", ["name", "speed", "weight", "owner"]),
    ),
    "counting": ("Count from 1 to 30.", count_answer(1, 30, 1, False)),
}
_SHOWN = frozenset(text.lower() for pair in DEMO_PROMPTS.values() for text in pair)

_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a toy model.",
    "You are a helpful toy model. Answer briefly.",
    "You are a small assistant that counts, sorts and spells.",
    "Be friendly.",
    "Answer the question.",
)
_AGAIN = ("Say that again.", "Repeat that.", "Again, please.", "repeat that please", "Once more.", "again")
_BACKWARDS = ("Now backwards.", "Now the other way round.", "now backwards please", "And backwards?")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt ("" for none) and the turns in order."""

    system: str
    turns: tuple[Turn, ...]


def is_held_out(key: str) -> bool:
    """One key in sixteen, by SHA-256, so that the split needs no list and no order; and the shown demo prompts."""
    key = key.lower()  # a prompt and the same prompt in small letters stand on the same side
    return hashlib.sha256(key.encode()).digest()[0] < 16 or key in _SHOWN


def turn(rng: Random, kind: str | None = None, *, held_out: bool = False) -> Turn:
    """Draw one turn of `kind` (any kind by weight when None) from the training or the held-out side."""
    while True:
        name = kind or rng.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
        drawn = KINDS[name][0](rng)
        if name != "tables" and rng.random() < 0.12:  # tables copy names as they were written
            drawn = dataclasses.replace(drawn, prompt=drawn.prompt.lower())
        if is_held_out(drawn.key) == held_out:
            return drawn


def _follow_up(rng: Random, last: Turn) -> Turn | None:
    if last.kind == "counting" and ", " in last.answer and rng.random() < 0.25:
        answer = ", ".join(reversed(last.answer.split(", ")))
        if not last.answer.startswith("That"):
            return Turn("counting", rng.choice(_BACKWARDS), answer, answer)
    if rng.random() < 0.05:
        return Turn(last.kind, rng.choice(_AGAIN), last.answer, last.answer)
    return None


def conversation(rng: Random) -> Conversation:
    """One to six turns, half of the time one; a system prompt in one of five."""
    system = rng.choice(_SYSTEMS) if rng.random() < 0.2 else ""
    wanted = 1 if rng.random() < 0.5 else rng.randint(2, 6)
    turns = [turn(rng)]
    while len(turns) < wanted:
        turns.append(_follow_up(rng, turns[-1]) or turn(rng))
    return Conversation(system, tuple(turns))


def conversations(seed: int, amount: int) -> Iterator[Conversation]:
    """`amount` training conversations, a pure function of the seed."""
    rng = Random(seed)
    return (conversation(rng) for _ in range(amount))


def held_out_turns(seed: int, counts: dict[str, int]) -> list[Turn]:
    """Distinct held-out single turns, `counts[kind]` of each kind, in a fixed order."""
    rng, seen, turns = Random(seed), set[str](), []
    for kind, amount in counts.items():
        drawn = 0
        while drawn < amount:
            one = turn(rng, kind, held_out=True)
            if one.prompt not in seen and one.answer not in seen:
                seen |= {one.prompt, one.answer}
                turns.append(one)
                drawn += 1
    return turns
