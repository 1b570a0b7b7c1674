"""What a server counts of its drafts, read from its ``/metrics`` page before and after requests, or from the reply.

Names: vLLM, https://docs.vllm.ai/en/stable/features/speculative_decoding/acceptance_metrics/ (counters, to which
Prometheus clients append ``_total``; the same page has ``metrics.speculative_decoding`` of a single reply) and
https://docs.vllm.ai/en/stable/design/metrics/ (``vllm:num_requests_running``, ``_waiting``, ``request_success``).
SGLang, https://docs.sglang.io/references/production_metrics.html: its ``sglang:spec_accept_length`` is a gauge over
requests of lately, so that no difference of it belongs to one request; ``sglext.spec_tokens_details`` of a reply does
(sgl-project/sglang PR 33518, asked for with ``return_spec_tokens_details``).
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_local import terminal
from dflash_local.errors import Interrupted, ServerError
from dflash_local.remote.endpoint import ANSWER_S, ServerEndpoint, Wait, within

SETTLE_S = 1.0  # a server counts a request as ended a moment after its last event
POLL_S = 0.05
MAX_POSITIONS = 64
MAX_COUNT = 2**53  # of anything; a larger number is none
MAX_STEP_MS = 1e6  # of a plain step
MAX_SOURCE = 80  # characters that say when it was measured

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d{1,4})"')
_DRAFTS = "vllm:spec_decode_num_drafts"
_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_ENDED = ("vllm:request_success", "sglang:num_requests")
_RECENT = "sglang:spec_accept_length"
# Of a reply's own figures: cycles, drafts, accepted drafts, accepted drafts of each cycle in order, their histogram.
VLLM_FIELDS = (
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "per_step_accepted",
    "acceptance_histogram",
)
SGLANG_FIELDS = (
    "spec_verify_ct",
    "spec_num_proposed_drafts",
    "spec_num_correct_drafts",
    "",
    "spec_correct_drafts_histogram",
)


@dataclass(frozen=True, slots=True)
class ServerAcceptance:
    """What the drafts of one request were worth.

    Attributes:
        lengths: per cycle, the bonus token included; empty where the server does not report single cycles.
        per_position: share of the cycles in which slot k was accepted; empty where not every cycle drafted every slot.
        block: anchor and drafts, where every cycle drafted the same number; else None.
        undrafted: passes without drafts are among the cycles, and nobody knows how many.
    """

    cycles: int
    drafted: int
    accepted: int
    lengths: tuple[int, ...] = ()
    per_position: tuple[float, ...] = ()
    undrafted: bool = False

    @property
    def mean(self) -> float | None:
        """Mean acceptance length: accepted drafts per cycle and the bonus token; None without a cycle."""
        return 1 + self.accepted / self.cycles if self.cycles else None

    @property
    def counts(self) -> tuple[int, int, int]:
        """Cycles, drafted tokens, accepted drafts."""
        return self.cycles, self.drafted, self.accepted

    @property
    def block(self) -> int | None:
        if not self.cycles or self.undrafted or self.drafted % self.cycles:
            return None
        return 1 + self.drafted // self.cycles


@dataclass(frozen=True, slots=True)
class Counters:
    """A ``/metrics`` page, as far as it is of use; None for what it does not hold.

    Attributes:
        ended: requests that ended since the server started. recent: SGLang's mean acceptance length of lately.
    """

    drafts: float | None = None
    draft_tokens: float | None = None
    accepted: float | None = None
    per_position: tuple[float, ...] = ()
    running: float | None = None
    waiting: float | None = None
    ended: float | None = None
    recent: float | None = None

    @property
    def speculation(self) -> bool:
        """True where the server counts drafts: vLLM registers the counters only when it drafts."""
        return self.drafts is not None or self.recent is not None

    @property
    def idle(self) -> bool:
        """True where the page shows that no request runs or waits."""
        return self.running == 0 and self.waiting == 0


class Unattributable(Exception):
    """The counters do not tell what one request did; the message says why."""


def parse(text: str) -> Counters:
    """The counters of a page in Prometheus' text format, summed over engines; lines that are no sample are left out."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.fullmatch(line.strip())
        if match is None:
            continue
        name, labels, value = match[1].removesuffix("_total"), match[2] or "", _number(match[3])
        if value is None:
            continue
        sums[name] = sums.get(name, 0.0) + value
        found = _POSITION.search(labels) if name == _PER_POSITION else None
        if found is not None and int(found[1]) < MAX_POSITIONS:
            positions[int(found[1])] = positions.get(int(found[1]), 0.0) + value
    return Counters(
        drafts=sums.get(_DRAFTS),
        draft_tokens=sums.get(_DRAFT_TOKENS),
        accepted=sums.get(_ACCEPTED),
        per_position=tuple(positions.get(place, 0.0) for place in range(max(positions, default=-1) + 1)),
        running=_first(sums, _RUNNING),
        waiting=_first(sums, _WAITING),
        ended=_first(sums, _ENDED),
        recent=sums.get(_RECENT),
    )


def read(endpoint: ServerEndpoint, wait: Wait | None = None) -> Counters | None:
    """The server's counters of now; None where it has no readable page.

    Raises:
        ServerError, Interrupted: see ``Endpoint.fetch``.
    """
    status, body = endpoint.get("/metrics", wait)
    if status != 200:
        return None
    found = parse(body.decode("utf-8", "replace"))
    return None if found == Counters() else found


def read_settled(
    endpoint: ServerEndpoint, before: Counters, requests: int = 1, wait: Wait | None = None
) -> Counters | None:
    """The counters after so many requests, once the server counts them as ended; else those of a second later."""
    deadline = time.monotonic() + SETTLE_S
    wait = wait or within(ANSWER_S)
    while True:
        try:
            after = read(endpoint, wait)
        except (ServerError, Interrupted):
            return None
        if after is None or after.ended is None or before.ended is None:
            return after
        done = after.idle and not 0 <= after.ended - before.ended < requests  # fewer than before: it was restarted
        if done or time.monotonic() > deadline:
            return after
        time.sleep(POLL_S)


def difference(before: Counters | None, after: Counters | None, requests: int = 1) -> ServerAcceptance:
    """What so many requests did, where no other one ran between the two readings.

    Raises:
        Unattributable: they do not tell.
    """
    if before is None or after is None:
        raise Unattributable("its /metrics cannot be read")
    if before.drafts is None or after.drafts is None or after.accepted is None or after.draft_tokens is None:
        recent = f"; its own mean of lately is {after.recent:.2f}" if after.recent else ""
        raise Unattributable(f"its /metrics count no drafts of single requests{recent}")
    if before.ended is None or after.ended is None or before.running is None or after.running is None:
        raise Unattributable("its /metrics do not count requests")
    changes = (
        after.drafts - before.drafts,
        after.draft_tokens - (before.draft_tokens or 0.0),
        after.accepted - (before.accepted or 0.0),
    )
    if after.ended < before.ended or min(changes) < 0:
        raise Unattributable("it was restarted meanwhile")
    if not before.idle or not after.idle or after.ended - before.ended != requests:
        raise Unattributable("other requests ran at the same time")
    cycles, drafted, accepted = map(round, changes)
    if accepted > drafted:
        raise Unattributable("its /metrics contradict themselves")
    kept = [now - old for now, old in zip(after.per_position, (*before.per_position, *[0.0] * MAX_POSITIONS))]
    whole = bool(cycles) and drafted == cycles * len(kept)
    return ServerAcceptance(cycles, drafted, accepted, (), tuple(one / cycles for one in kept) if whole else ())


def of_reply(content: Mapping[str, Any]) -> ServerAcceptance | None:
    """What a server reports in an event of the reply itself; None where it reports nothing.

    vLLM: ``metrics.speculative_decoding``, where it was started with ``--per-request-spec-decode-metrics``. SGLang:
    ``sglext.spec_tokens_details``. llama.cpp: ``timings``, of the whole reply.
    """
    metrics = content.get("metrics")
    found = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if isinstance(found, dict):
        return _reported(found, VLLM_FIELDS)
    extension = content.get("sglext", content.get("sgl_ext"))
    timings = content.get("timings")
    if isinstance(timings, dict):
        return _timed(timings)
    details = extension.get("spec_tokens_details") if isinstance(extension, dict) else None
    if isinstance(details, list):
        details = details[0] if len(details) == 1 else None
    return _reported(details, SGLANG_FIELDS) if isinstance(details, dict) else None


def plain_step_of_reply(content: Mapping[str, Any]) -> tuple[float, str] | None:
    """Seconds of a plain step and when they were measured, as our own server tells in an event; None elsewhere.

    It is ``metrics.dflash`` of ``api/reply.py``.
    """
    metrics = content.get("metrics")
    own = metrics.get("dflash") if isinstance(metrics, dict) else None
    if not isinstance(own, dict):
        return None
    step_ms, source = own.get("plain_step_ms"), own.get("plain_from")
    if not isinstance(step_ms, (int, float)) or isinstance(step_ms, bool) or not 0 < step_ms < MAX_STEP_MS:
        return None
    told = terminal.safe_line(source)[:MAX_SOURCE] if isinstance(source, str) else "measured"
    return step_ms / 1000, f"{told}, by the server"


def _reported(found: Mapping[str, Any], names: tuple[str, str, str, str, str]) -> ServerAcceptance | None:
    """The figures of a reply, unless they contradict themselves."""
    cycles, drafted, accepted = (_count(found.get(name)) for name in names[:3])
    if cycles is None or drafted is None or accepted is None or accepted > drafted:
        return None
    steps, histogram = (_counts(found.get(name)) for name in names[3:])
    lengths = tuple(1 + count for count in steps) if len(steps) == cycles and sum(steps) == accepted else ()
    slots = len(histogram) - 1
    whole = cycles > 0 and slots > 0 and sum(histogram) == cycles and drafted == cycles * slots
    shares = tuple(sum(histogram[place:]) / cycles for place in range(1, slots + 1)) if whole else ()
    return ServerAcceptance(cycles, drafted, accepted, lengths, shares)


def _timed(found: Mapping[str, Any]) -> ServerAcceptance | None:
    """llama.cpp counts tokens alone: each pass behind the prompt's wrote one more than it accepted."""
    tokens = _count(found.get("predicted_n"))
    drafted, accepted = (_count(found.get(name, 0)) for name in ("draft_n", "draft_n_accepted"))  # absent at none
    if tokens is None or drafted is None or accepted is None or not accepted <= min(drafted, tokens):
        return None
    return ServerAcceptance(max(0, tokens - 1 - accepted), drafted, accepted, undrafted=True)


def _count(value: Any) -> int | None:
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT
    return value if good else None


def _counts(value: Any) -> tuple[int, ...]:
    counts = [_count(one) for one in value] if isinstance(value, list) else []
    return () if None in counts else tuple(one for one in counts if one is not None)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= MAX_COUNT else None


def _first(sums: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    return next((sums[name] for name in names if name in sums), None)
