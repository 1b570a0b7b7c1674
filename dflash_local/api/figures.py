"""Usage and per-request figures, as OpenAI's and vLLM's answers carry them.

``speculative_decoding`` has vLLM's names (https://docs.vllm.ai/en/stable/features/speculative_decoding/acceptance_metrics/)
and one more, ``acceptance_per_position``; the times beside it are those of its per-request metrics. An
acceptance length counts the bonus token: 1 + accepted drafts per cycle. What a server of another program does not
report is left out, or null.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dflash_local.events import Finished, Stats
from dflash_local.remote.server_checks import PROGRAMS

IMPOSSIBLE = -9999.0  # what OpenAI sends for a token of no probability; JSON has no infinity


def finite(logprob: float) -> float:
    """A log probability as JSON can hold it."""
    return max(logprob, IMPOSSIBLE)


@dataclass(slots=True)
class Tally:
    """What must be counted while the events go by."""

    reused: int = 0
    drafted: int = 0
    notices: list[str] = field(default_factory=list)

    def usage(self, finished: Finished) -> dict[str, Any] | None:
        """OpenAI's ``usage`` object; None where a server of another program reports none."""
        usage, in_server = finished.usage, finished.stats.engine in PROGRAMS
        if in_server and not usage.prompt_tokens and not usage.completion_tokens:
            return None
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            **({} if in_server and not self.reused else {"prompt_tokens_details": {"cached_tokens": self.reused}}),
        }

    def metrics(self, finished: Finished) -> dict[str, Any]:
        """vLLM's ``metrics`` object, and under ``dflash`` what makes the reply repeatable, and notices."""
        stats, tokens = finished.stats, finished.usage.completion_tokens
        in_server = stats.engine in PROGRAMS
        phases = {
            "draft_ms": 1000 * stats.draft_s,
            "verify_ms": 1000 * stats.verify_s,
            "other_ms": 1000 * stats.other_s,
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
        """None when nothing was drafted, or a server does not report it."""
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
