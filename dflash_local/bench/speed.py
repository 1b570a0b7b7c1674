"""AR against DFlash over a list of prompts on one loaded session: speed, acceptance, equality, answers.

Every figure comes from the engine's own ``Stats`` of these very runs; nothing is remembered or quoted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dflash_local.bench.prompts import Prompt
from dflash_local.bench.trial import Written, prompt_ids, write
from dflash_local.engine.figures import acceptance_per_position
from dflash_local.engine.session import Session
from dflash_local.events import Mode
from dflash_local.request import Limits, Request

Progress = Callable[[str, float], None]
WARM_UP_TOKENS = 16
TOTAL = "total"
BOTH: tuple[Mode, Mode] = ("ar", "dflash")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt both ways. ``right`` says of each text whether it is the expected answer, None without one."""

    prompt: Prompt
    ids: tuple[int, ...]
    ar: Written
    dflash: Written

    @property
    def equal(self) -> bool:
        """The same token ids."""
        return self.ar.ids == self.dflash.ids

    def right(self, written: Written) -> bool | None:
        """Is the text the expected answer, up to white space at its ends."""
        return None if self.prompt.answer is None else written.text.strip() == self.prompt.answer.strip()


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one kind of prompt, or of all.

    Attributes:
        mean_acceptance_length: over all cycles that drafted. turn_acceptance_length: completion tokens / cycles
            of each reply, averaged over replies.
        acceptance_per_position: share of the cycles that drafted slot k in which it was accepted.
        ar_tokens_per_s, dflash_tokens_per_s: decode rate over all replies, first tokens left out.
        ratio: decode time without / with drafting, summed over the prompts.
        ar_right, dflash_right: right answers of ``answers`` that were expected.
    """

    kind: str
    prompts: int
    tokens: int
    cycles: int
    mean_acceptance_length: float | None
    turn_acceptance_length: float | None
    acceptance_per_position: tuple[float, ...]
    ar_tokens_per_s: float
    dflash_tokens_per_s: float
    ar_decode_s: float
    dflash_decode_s: float
    ratio: float | None
    equal: int
    answers: int
    ar_right: int
    dflash_right: int


@dataclass(slots=True)
class SpeedOptions:
    """What is run on every prompt."""

    max_new_tokens: int = 256
    block_size: int | None = None
    thinking: bool = False
    progress: Progress = field(default=lambda _text, _fraction: None)


def compare(session: Session, prompts: Sequence[Prompt], options: SpeedOptions) -> list[Comparison]:
    """Run every prompt both ways, greedily and from cold caches, after a warm-up.

    Which way goes first alternates, so that a machine that warms up or slows down favours neither.

    Raises:
        DFlashError: a request failed.
    """
    ids = [prompt_ids(session, prompt, options.thinking) for prompt in prompts]
    for mode in BOTH:
        write(session, _request(ids[0], mode, options, WARM_UP_TOKENS))
    comparisons: list[Comparison] = []
    for number, (prompt, rendered) in enumerate(zip(prompts, ids, strict=True)):
        options.progress(f"prompt {number + 1} of {len(prompts)}", number / len(prompts))
        order = BOTH if number % 2 == 0 else BOTH[::-1]
        written = {mode: write(session, _request(rendered, mode, options, options.max_new_tokens)) for mode in order}
        comparisons.append(Comparison(prompt, rendered, written["ar"], written["dflash"]))
    return comparisons


def _request(ids: tuple[int, ...], mode: Mode, options: SpeedOptions, tokens: int) -> Request:
    block = options.block_size if mode == "dflash" else None
    return Request(prompt_ids=ids, limits=Limits(tokens), mode=mode, block_size=block)


def rows(comparisons: Sequence[Comparison]) -> list[Row]:
    """A row for each kind in order of appearance, and one for all when there are several."""
    kinds = list(dict.fromkeys(one.prompt.kind for one in comparisons))
    by_kind = [_row(kind, [one for one in comparisons if one.prompt.kind == kind]) for kind in kinds]
    return [*by_kind, _row(TOTAL, comparisons)] if len(kinds) > 1 else by_kind


def _row(kind: str, comparisons: Sequence[Comparison]) -> Row:
    lengths = [length for one in comparisons for length in one.dflash.stats.acceptance_lengths]
    turns = [one.dflash.stats.turn_acceptance_length for one in comparisons]
    cards = [turn for turn in turns if turn is not None]
    ar_s, dflash_s = (sum(w.stats.decode_s for w in side) for side in _sides(comparisons))
    ar_after, dflash_after = (sum(max(len(w.ids) - 1, 0) for w in side) for side in _sides(comparisons))
    expected = [one for one in comparisons if one.prompt.answer is not None]
    return Row(
        kind=kind,
        prompts=len(comparisons),
        tokens=sum(len(one.dflash.ids) for one in comparisons),
        cycles=sum(len(one.dflash.cycles) for one in comparisons),
        mean_acceptance_length=sum(lengths) / len(lengths) if lengths else None,
        turn_acceptance_length=sum(cards) / len(cards) if cards else None,
        acceptance_per_position=acceptance_per_position(
            [(cycle.drafted, cycle.accepted) for one in comparisons for cycle in one.dflash.cycles]
        ),
        ar_tokens_per_s=ar_after / ar_s if ar_s else 0.0,
        dflash_tokens_per_s=dflash_after / dflash_s if dflash_s else 0.0,
        ar_decode_s=ar_s,
        dflash_decode_s=dflash_s,
        ratio=ar_s / dflash_s if dflash_s else None,
        equal=sum(one.equal for one in comparisons),
        answers=len(expected),
        ar_right=sum(bool(one.right(one.ar)) for one in expected),
        dflash_right=sum(bool(one.right(one.dflash)) for one in expected),
    )


def _sides(comparisons: Sequence[Comparison]) -> tuple[list[Written], list[Written]]:
    return [one.ar for one in comparisons], [one.dflash for one in comparisons]
