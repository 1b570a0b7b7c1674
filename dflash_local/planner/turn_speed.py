"""How long a turn takes, predicted: the part of its prompt that is new, then its reply behind that prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dflash_local.planner.speed import Prediction


class TurnSize(NamedTuple):
    """Counts the tokens of a turn: its prompt, those of them that stood in the turn before, and its reply."""

    prompt: int
    reused: int
    reply: int


class TurnSeconds(NamedTuple):
    """Predicts a turn in seconds.

    Attributes:
        first_token: until there is one; None where no prompt's time is predicted, and then in no other figure.
        plain: all of it, without drafts. fastest, slowest: all of it with drafts, at the highest and the lowest
            expected acceptance length; None where none is expected.
    """

    first_token: float | None
    plain: float
    fastest: float | None = None
    slowest: float | None = None


class TurnSpeed:
    """Predicts turns of any size by what was predicted of a plan behind a few contexts."""

    def __init__(self, found: Prediction, copies: Mapping[int, int]) -> None:
        """Take ``copies`` as ``cycles_per_token`` does."""
        times = found.times
        self._contexts = [one.context for one in times]
        self._steps = [one.step_ms for one in times]
        # A prompt's time for each token grows with its length in a line.
        self._prompts = [one.prompt_ms / one.context for one in times if one.prompt_ms is not None]
        self._cycles = [one.cycle_ms for one in times if one.cycle_ms is not None]
        lengths = found.acceptance if len(self._cycles) == len(times) else None
        drafted = () if lengths is None else (lengths.high, lengths.low)
        self._per_token = [cycles_per_token(length, copies) for length in drafted]

    def seconds(self, turn: TurnSize) -> TurnSeconds:
        """Predict one turn. Drafting ends where plain steps are faster."""
        behind = turn.prompt + turn.reply / 2
        step = self._at(self._steps, behind)
        first = 0.0
        if self._prompts:  # a pass reads all weights, however few rows it has
            first = max(step, self._prompt_ms(turn.prompt) - self._prompt_ms(turn.reused)) / 1e3
        cycle = self._at(self._cycles, behind) if self._per_token else 0.0
        drafted = [first + turn.reply * min(step, cycle * count) / 1e3 for count in self._per_token]
        return TurnSeconds(first if self._prompts else None, first + turn.reply * step / 1e3, *drafted)

    def _prompt_ms(self, tokens: int) -> float:
        return tokens * self._at(self._prompts, tokens)

    def _at(self, values: Sequence[float], context: float) -> float:
        """Interpolate between the contexts around, or go on in a line; a single value holds everywhere."""
        if len(values) == 1:
            return values[0]
        contexts = self._contexts
        after = next((at for at in range(1, len(contexts) - 1) if contexts[at] >= context), len(contexts) - 1)
        share = (context - contexts[after - 1]) / (contexts[after] - contexts[after - 1])
        return values[after - 1] + (values[after] - values[after - 1]) * share


def cycles_per_token(length: float, copies: Mapping[int, int]) -> float:
    """Return cycles for each token where copies of the text take the place of drafts that are worth less.

    Args:
        length: acceptance length of the drafter. copies: of a replay with copies alone, how many cycles there were by
            the tokens that they emitted. That one of them is worth more than the drafter's is known here only
            afterwards; on the other hand it counts as long as a cycle with the drafter's pass.
    """
    total = sum(emitted * count for emitted, count in copies.items())
    cycles = sum(count * (1.0 if emitted > length else emitted / length) for emitted, count in copies.items())
    return cycles / total if total else 1.0 / length
