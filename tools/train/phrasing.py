"""How a toy user words a request: one task, many phrasings. Knows nothing about answers."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its one right answer. Turns whose `key` hashes into the held-out part never train."""

    kind: str
    prompt: str
    answer: str
    key: str


_FRAMES = (
    ("{C}.", 8), ("{C}", 4), ("{c}", 3), ("Please {c}.", 3), ("{C}, please.", 3), ("Can you {c}?", 3),
    ("Could you {c}?", 2), ("please {c}", 1), ("{c} please", 1), ("I want you to {c}.", 1), ("Now {c}.", 1),
    ("can you {c}", 1), ("Hi! {C}.", 1), ("I need you to {c}.", 1), ("Would you {c}?", 1), ("{C}!", 1),
)
_FRAME_TEXTS = [text for text, _ in _FRAMES]
_FRAME_WEIGHTS = [weight for _, weight in _FRAMES]


def capital(text: str) -> str:
    """The text with its first letter raised and the rest left alone."""
    return text[:1].upper() + text[1:]


def ask(rng: Random, request: str) -> str:
    """Word an imperative ("count to 7") the way different people would."""
    frame = rng.choices(_FRAME_TEXTS, _FRAME_WEIGHTS)[0]
    return frame.format(c=request, C=capital(request))


def question(rng: Random, text: str) -> str:
    """Word a question ("what is the capital of France") with or without capital and question mark."""
    form = rng.choices(("{C}?", "{c}?", "{C}", "{c}", "Please tell me: {c}?", "Hi, {c}?"), (8, 2, 2, 3, 1, 1))[0]
    return form.format(c=text, C=capital(text))


def listed(items: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
