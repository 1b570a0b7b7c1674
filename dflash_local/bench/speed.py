"""Plain against DFlash over prompts on one session, by the engine's ``Stats``: speed, acceptance, equality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash_local.bench.prompts import Prompt
from dflash_local.bench.report import TOY, Found, Progress, by_kind, finite, header, number, table
from dflash_local.bench.trial import Written, prompt_ids, write
from dflash_local.catalog.bundled import Pair
from dflash_local.engine.reply_figures import acceptance_per_position
from dflash_local.engine.session import Session
from dflash_local.events import Mode
from dflash_local.loaded import SessionFacts
from dflash_local.request import Limits, Request, SamplingParams

WARM_UP_TOKENS = 16
TITLES = (
    *("kind", "prompts", "tokens", "per cycle", "per turn"),
    *("plain tok/s", "DFlash tok/s", "ratio", "equal"),
)
BOTH: tuple[Mode, Mode] = ("ar", "dflash")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt both ways."""

    prompt: Prompt
    ids: tuple[int, ...]
    ar: Written
    dflash: Written

    @property
    def equal(self) -> bool:
        """The same token ids."""
        return self.ar.ids == self.dflash.ids


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """Figures of one kind of prompt, or of all.

    Attributes:
        mean_acceptance_length: over all cycles that drafted.
        turn_acceptance_length: completion tokens / cycles of each reply, averaged over replies.
        acceptance_per_position: share of the cycles that drafted slot k in which it was accepted.
        ar_tokens_per_s, dflash_tokens_per_s: decode rate over all replies, first tokens left out; 0 where no reply
            has a second one.
        ratio: decode time without / with drafting; None where one of the rates is not known.
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


@dataclass(frozen=True, slots=True)
class SpeedOptions:
    """What is run on every prompt."""

    max_new_tokens: int = 256
    block_size: int | None = None
    thinking: bool = False
    sampling: SamplingParams = SamplingParams()


def compare(
    session: Session,
    prompts: Sequence[Prompt],
    options: SpeedOptions,
    progress: Progress = lambda _text, _fraction: None,
) -> list[Comparison]:
    """Run every prompt both ways and from cold caches, after a warm-up.

    Which way goes first alternates, so that a machine that warms up or slows down favours neither.

    Raises:
        DFlashError: a request failed.
    """
    ids = [prompt_ids(session, prompt, options.thinking) for prompt in prompts]
    for mode in BOTH:
        write(session, _request(ids[0], mode, options, WARM_UP_TOKENS))
    comparisons: list[Comparison] = []
    for done, (prompt, rendered) in enumerate(zip(prompts, ids, strict=True)):
        progress(f"prompt {done + 1} of {len(prompts)}", done / len(prompts))
        order = BOTH if done % 2 == 0 else BOTH[::-1]
        written = {mode: write(session, _request(rendered, mode, options, options.max_new_tokens)) for mode in order}
        comparisons.append(Comparison(prompt, rendered, written["ar"], written["dflash"]))
    return comparisons


def _request(ids: tuple[int, ...], mode: Mode, options: SpeedOptions, tokens: int) -> Request:
    block = options.block_size if mode == "dflash" else None
    return Request(prompt_ids=ids, sampling=options.sampling, limits=Limits(tokens), mode=mode, block_size=block)


def rows(comparisons: Sequence[Comparison]) -> list[SpeedRow]:
    """A row for each kind in order of appearance, and one for all when there are several."""
    return by_kind(comparisons, lambda one: one.prompt.kind, _row)


def _row(kind: str, comparisons: Sequence[Comparison]) -> SpeedRow:
    lengths = [length for one in comparisons for length in one.dflash.stats.acceptance_lengths]
    turns = [one.dflash.stats.turn_acceptance_length for one in comparisons]
    cards = [turn for turn in turns if turn is not None]
    sides = [one.ar for one in comparisons], [one.dflash for one in comparisons]
    ar_s, dflash_s = (sum(w.stats.decode_s for w in side) for side in sides)
    ar_after, dflash_after = (sum(max(len(w.ids) - 1, 0) for w in side) for side in sides)
    ar_rate, dflash_rate = ar_after / ar_s if ar_s else 0.0, dflash_after / dflash_s if dflash_s else 0.0
    return SpeedRow(
        kind=kind,
        prompts=len(comparisons),
        tokens=sum(len(one.dflash.ids) for one in comparisons),
        cycles=sum(len(one.dflash.cycles) for one in comparisons),
        mean_acceptance_length=sum(lengths) / len(lengths) if lengths else None,
        turn_acceptance_length=sum(cards) / len(cards) if cards else None,
        acceptance_per_position=acceptance_per_position(
            [(cycle.drafted, cycle.accepted) for one in comparisons for cycle in one.dflash.cycles]
        ),
        ar_tokens_per_s=ar_rate,
        dflash_tokens_per_s=dflash_rate,
        ar_decode_s=ar_s,
        dflash_decode_s=dflash_s,
        ratio=ar_s / dflash_s if ar_rate and dflash_rate else None,
        equal=sum(one.equal for one in comparisons),
    )


def presented(pair: Pair, facts: SessionFacts, comparisons: Sequence[Comparison], options: SpeedOptions) -> Found:
    """Return every figure, per kind and per prompt; and the table with what its figures are."""
    figures = rows(comparisons)
    last, block = figures[-1], options.block_size or facts.block_size
    chosen = "greedy" if options.sampling.greedy else f"temperature {options.sampling.temperature:g}"
    report = finite(
        {
            **header("dflash bench", pair, facts),
            "block_size": block,
            "max_new_tokens": options.max_new_tokens,
            "rows": [asdict(row) for row in figures],
            "prompts": [
                {
                    "kind": one.prompt.kind,
                    "prompt_tokens": len(one.ids),
                    "equal": one.equal,
                    "ar": _written(one.ar),
                    "dflash": _written(one.dflash),
                }
                for one in comparisons
            ],
        }
    )
    lines = [
        f"{pair.label}: {facts.computed_as}, block {block}, {chosen}",
        "",
        *table(TITLES, [_cells(row) for row in figures]),
        "",
        "accepted per position: " + " ".join(f"{share:.0%}" for share in last.acceptance_per_position),
        f"text equal in {last.equal} of {last.prompts}",
        "acceptance length: accepted drafts + 1, mean over cycles that drafted, and tokens / cycles of each reply; "
        "ratio: decode time of plain / DFlash in this run",
        *(f"notice: {notice}" for notice in sorted({n for one in comparisons for n in one.dflash.notices})),
    ]
    return report, [*lines, f"({TOY})"] if pair.toy else lines


def _written(written: Written) -> dict[str, Any]:
    stats = written.stats
    times = ("tokens_per_s", "prefill_s", "decode_s", "draft_s", "verify_s")
    return {
        "tokens": len(written.ids),
        "finish_reason": written.reason,
        "acceptance_lengths": list(stats.acceptance_lengths),
        "verify_rows": dict(stats.verify_rows),
        **{name: getattr(stats, name) for name in times},
        "notices": list(written.notices),
    }


def _cells(row: SpeedRow) -> tuple[str, ...]:
    return (
        row.kind,
        str(row.prompts),
        str(row.tokens),
        number(row.mean_acceptance_length, 2),
        number(row.turn_acceptance_length, 2),
        number(row.ar_tokens_per_s or None, 1),
        number(row.dflash_tokens_per_s or None, 1),
        "-" if row.ratio is None else f"{row.ratio:.2f}x",
        f"{row.equal}/{row.prompts}",
    )
