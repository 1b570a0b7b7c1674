"""What the engine reports while it works, to every front end: frozen, JSON-able records, no tensors, no behaviour."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Channel = Literal["thinking", "final", "tool"]
Origin = Literal["accepted", "bonus"]
FinishReason = Literal["stop", "length", "cancelled"]
Mode = Literal["dflash", "ar"]
Bytes = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one channel, safe to show, with where its last token came from.

    ``accepted``: a drafted token the target agreed with; ``bonus``: one the target chose itself, as the first of a
    reply.
    """

    text: str
    channel: Channel = "final"
    origin: Origin = "bonus"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the target held an emitted token, before temperature, filters and penalties.

    Attributes:
        text: the token alone; bytes that are no whole character are spelled ``\\xNN``, as OpenAI does.
        top: the likeliest tokens of that position, best first, as (id, text, natural log probability, bytes).
        bytes: what the token adds to the reply in UTF-8; None for a token that is never shown, and where a server names
            tokens by their ids alone.
    """

    token_id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float, Bytes], ...] = ()
    bytes: Bytes = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; a stop id counts, what the model wrote after it does not.

    ``thinking_tokens``: of the completion's; a server of another program does not tell.
    """

    prompt_tokens: int
    completion_tokens: int
    thinking_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of one finished request. Times in seconds.

    Attributes:
        acceptance_lengths: for each cycle that drafted, the drafts that the target accepted and the bonus token.
            Uncut, as vLLM counts: a stop or a limit ends the text inside the last cycle, not its length. The
            first token of a reply belongs to no cycle.
        acceptance_per_position: share of the cycles that drafted slot k (1-based) in which it was accepted.
        mean_acceptance_length: mean of ``acceptance_lengths`` (per cycle); None where nothing was drafted.
        turn_acceptance_length: completion tokens / cycles, those that drafted nothing included (per turn); None
            where nothing was drafted.
        tokens_per_s: decode rate of emitted tokens, first one excluded; ``end_to_end_tokens_per_s`` includes prefill.
        draft_s, verify_s, other_s: decode time by phase (host clock; device synchronised).
        verify_rows: (rows verified, cycles) pairs, by rows; ``mean_verify_rows`` is their mean per cycle.
        undrafted_cycles: cycles that drafted nothing: every one in ``ar`` mode, some where drafting does not pay.
        copied_cycles: cycles whose drafts were copied from the text, not the drafter's.
        mtp_cycles: cycles with drafts of the target's own layer, which drafts beside the drafter (``--mtp``).
        distinct_experts: (rows verified, different routed experts of a layer that they took) pairs, by rows: means of
            all layers and of the cycles that were looked at, the first of each number of rows among them; none where
            the target has no experts or the engine does not count them.
        plain_step_s: a step of the target alone by this load of the pair; None where that was not measured.
            ``plain_from``: when it was, in words.
        draft_counts: cycles, tokens drafted and drafts accepted, where a server of another program counts them;
            None elsewhere.
    """

    acceptance_lengths: tuple[int, ...]
    acceptance_per_position: tuple[float, ...]
    mean_acceptance_length: float | None
    turn_acceptance_length: float | None
    tokens_per_s: float
    end_to_end_tokens_per_s: float
    ttft_s: float
    prefill_s: float
    decode_s: float
    draft_s: float
    verify_s: float
    other_s: float
    engine: str
    mode: Mode
    block_size: int
    seed: int
    verify_rows: tuple[tuple[int, int], ...] = ()
    mean_verify_rows: float | None = None
    undrafted_cycles: int = 0
    copied_cycles: int = 0
    mtp_cycles: int = 0
    distinct_experts: tuple[tuple[int, float], ...] = ()
    plain_step_s: float | None = None
    plain_from: str = ""
    draft_counts: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Loading of a pair: what is happening and how far it is (0..1)."""

    stage: str
    fraction: float


@dataclass(frozen=True, slots=True)
class PullProgress:
    """Download of one repository: bytes here of bytes in all.

    ``verified``: of whole files that were proven. ``resumed``: here at the start, or being hashed where they lie.
    """

    repo: str
    done: int
    total: int
    verified: int = 0
    resumed: int = 0


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits; ``position`` requests are before it."""

    position: int


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prompt tokens processed of prompt tokens to process (reused ones not counted)."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is processed. ``reused_tokens`` of it were still in the caches; its ids come on request."""

    prompt_tokens: int
    reused_tokens: int
    prefill_s: float
    prompt_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One cycle (or, with ``rows`` 0, the first token of the reply).

    Attributes:
        pieces: text that became safe to show; may lag behind ``token_ids``.
        token_ids: ids emitted by this cycle, in order, after cutting at a stop or the limit.
        drafted: tokens proposed. accepted: of these, accepted by the target, uncut: a stop or a limit may leave
            some of them out of ``token_ids``. rows: rows the target verified.
        t_s: seconds since the request started.
        logprobs: one for each of ``token_ids`` when the request has them, else none.
        drafts: cycles that proposed the drafted tokens: one, or more where a slow reader got several as one.
        experts: different routed experts of a layer that the rows took, the mean of all layers; None where that was not
            looked at, as in most cycles.
        copied, mtp: of ``drafts``, those that were copied from the text, and those of the target's own layer beside the
            drafter.
    """

    pieces: tuple[Piece, ...]
    token_ids: tuple[int, ...]
    drafted: int
    accepted: int
    rows: int
    t_s: float
    logprobs: tuple[TokenLogprob, ...] = ()
    drafts: int = 1
    experts: float | None = None
    copied: int = 0
    mtp: int = 0


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the user should know: an alarm, a fallback, an override."""

    message: str
    level: Literal["info", "warning"] = "info"


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request. ``stop``: the stop string that ended the text; empty where none did."""

    reason: FinishReason
    usage: Usage
    stats: Stats
    stop: str = ""


Event = Queued | LoadProgress | PullProgress | PrefillProgress | Started | Step | Notice | Finished


def as_dict(event: Event) -> dict[str, Any]:
    """Return the JSON form of an event: its fields and, under ``event``, its name."""
    return {"event": type(event).__name__, **asdict(event)}
