"""Events to the objects of an answer: what all dialects have in common, and the figures of a reply.

``speculative_decoding`` has vLLM's names (https://docs.vllm.ai/en/stable/features/speculative_decoding/acceptance_metrics/)
and one more, ``acceptance_per_position``; the times beside it are those of its per-request metrics. An acceptance
length counts the bonus token: 1 + accepted drafts per cycle. What a server of another program does not report is left
out, or null.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dflash_local.api.log import LOGGER
from dflash_local.api.refusals import as_json, cut_off
from dflash_local.api.request_body import ParsedRequest
from dflash_local.events import Event, Finished, Notice, Started, Stats, Step
from dflash_local.remote.server_checks import PROGRAMS
from dflash_local.service.backend import Model


@dataclass(slots=True)
class Tally:
    """What must be counted while the events go by."""

    reused: int = 0
    drafted: int = 0
    notices: list[str] = field(default_factory=list)

    def usage(self, finished: Finished) -> dict[str, Any] | None:
        """Return OpenAI's ``usage`` object; None where a server of another program reports none."""
        usage, in_server = finished.usage, finished.stats.engine in PROGRAMS
        if in_server and not usage.prompt_tokens and not usage.completion_tokens:
            return None
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            **({} if in_server and not self.reused else {"prompt_tokens_details": {"cached_tokens": self.reused}}),
            **(
                {"completion_tokens_details": {"reasoning_tokens": thought}}
                if (thought := usage.thinking_tokens)
                else {}
            ),
        }

    def metrics(self, finished: Finished) -> dict[str, Any]:
        """Return vLLM's ``metrics`` object, and under ``dflash`` what makes the reply repeatable, and notices."""
        stats, tokens = finished.stats, finished.usage.completion_tokens
        in_server = stats.engine in PROGRAMS
        phases = {
            "draft_ms": 1000 * stats.draft_s,
            "verify_ms": 1000 * stats.verify_s,
            "other_ms": 1000 * stats.other_s,
            "plain_step_ms": None if stats.plain_step_s is None else 1000 * stats.plain_step_s,
            "plain_from": stats.plain_from or None,
        }
        return {
            "time_to_first_token_ms": 1000 * stats.ttft_s,
            "generation_time_ms": 1000 * stats.decode_s,
            "mean_itl_ms": 1000 * stats.decode_s / (tokens - 1) if tokens > 1 else None,
            "tokens_per_second": (stats.tokens_per_s or None) if in_server else stats.tokens_per_s,
            "speculative_decoding": self._acceptance(stats),
            "dflash": {
                "seed": stats.seed,
                "mode": stats.mode,
                "block_size": stats.block_size or None,
                "engine": stats.engine,
                **({} if in_server else phases),
                "notices": self.notices,
            },
        }

    def _acceptance(self, stats: Stats) -> dict[str, Any] | None:
        """Return None when nothing was drafted, or a server does not report it."""
        kept = [length - 1 for length in stats.acceptance_lengths]
        cycles, drafted, accepted = stats.draft_counts or (len(kept), self.drafted, sum(kept))
        if not cycles or not drafted:
            return None
        slots = stats.block_size - 1
        histogram = [kept.count(count) for count in range(max(*kept, slots) + 1)] if kept else []
        shares = list(stats.acceptance_per_position)
        return {
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": accepted / drafted,
            **({"acceptance_histogram": histogram} if histogram else {}),
            **({"acceptance_per_position": shares} if shares or kept else {}),
            "num_spec_steps": cycles,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            **({"num_spec_tokens": slots} if slots > 0 else {}),
        }


class Reply(ABC):
    """One reply, streamed (``begin``, ``chunks`` of every event, ``end``) or whole (``body``, after all ``chunks``).

    Args:
        model: it may still be loading. fingerprint: what made the reply, once it is loaded.
    """

    stream_type = "text/event-stream; charset=utf-8"
    keep_alive = b": waiting\n\n"  # a comment: tells both ends that the other one is there
    end = b""

    def __init__(self, parsed: ParsedRequest, model: Model, fingerprint: Callable[[], str]) -> None:
        self._parsed, self._model, self._fingerprint = parsed, model, fingerprint
        self._tally = Tally(notices=[f"taken without effect: {line}" for line in parsed.taken])

    @staticmethod
    def frame(chunk: dict[str, Any]) -> bytes:
        """Return a chunk as it stands in a stream: an event of its type."""
        return b"event: " + str(chunk["type"]).encode() + b"\ndata: " + as_json(chunk) + b"\n\n"

    def error(self, told: dict[str, Any]) -> bytes:
        """Return how a stream ends in an error, of which ``told`` is the body where no stream has begun."""
        return self.frame(told) + self.end

    def begin(self) -> Iterator[dict[str, Any]]:
        """Return the chunks before those of events."""
        return iter(())

    def chunks(self, event: Event | None) -> Iterator[dict[str, Any]]:
        """Return the chunks that an event becomes.

        Raises:
            Refusal: the reply was cancelled, and not by its client: the model is being unloaded or the server ends.
        """
        if isinstance(event, Started):
            self._tally.reused = event.reused_tokens
            yield from self._started(event)
        elif isinstance(event, Notice):
            self._tally.notices.append(event.message)
            if event.level == "warning":
                LOGGER.warning("%s", event.message)
        elif isinstance(event, Step):
            self._tally.drafted += event.drafted
            yield from self._step(event)
        elif isinstance(event, Finished):
            if event.reason == "cancelled":
                raise cut_off()
            yield from self._last(event)

    @abstractmethod
    def body(self, event: Finished) -> dict[str, Any]:
        """Return the whole answer."""

    def _started(self, event: Started) -> Iterator[dict[str, Any]]:
        """Return the chunks before the first text."""
        return iter(())

    @abstractmethod
    def _step(self, event: Step) -> Iterator[dict[str, Any]]:
        """Return the chunks of one step's text."""

    @abstractmethod
    def _last(self, event: Finished) -> Iterator[dict[str, Any]]:
        """Return the last chunks."""
