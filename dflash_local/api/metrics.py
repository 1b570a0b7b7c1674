"""Counters and histograms of all requests, in Prometheus' text form under vLLM's names.

Names as in https://docs.vllm.ai/en/stable/design/metrics/ so that its dashboards fit; ``position`` counts from 0.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from dflash_local.events import Event, Finished, Started, Step
from dflash_local.request import Request

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
E2E_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
COUNTERS = {
    "prompt_tokens": "Prompt tokens processed or reused.",
    "generation_tokens": "Tokens emitted.",
    "prefix_cache_queries": "Prompt tokens looked up in the caches of earlier turns.",
    "prefix_cache_hits": "Prompt tokens found there.",
    "spec_decode_num_drafts": "Blocks drafted.",
    "spec_decode_num_draft_tokens": "Tokens drafted.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that the target accepted.",
}
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


class Histogram:
    """Counts of values up to each bound, their sum and their number."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * len(bounds)
        self._sum = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        self._sum += value
        self._count += 1
        for index, bound in enumerate(self._bounds):
            if value <= bound:
                self._counts[index] += 1

    def lines(self, name: str, labels: str) -> Iterator[str]:
        for bound, count in zip(self._bounds, self._counts):
            yield f'{name}_bucket{{{labels},le="{float(bound)}"}} {count}'
        yield f'{name}_bucket{{{labels},le="+Inf"}} {self._count}'
        yield f"{name}_sum{{{labels}}} {self._sum}"
        yield f"{name}_count{{{labels}}} {self._count}"


class Metrics:
    """The figures of one server. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._positions: list[int] = []
        self._ids = 0  # that the request of now has named
        self._finished: dict[str, int] = {}
        self._first_token = Histogram(TTFT_BUCKETS)
        self._whole = Histogram(E2E_BUCKETS)

    def observe(self, _request: Request, event: Event) -> None:
        """Count an event as the engine emits it, before slow readers see several as one."""
        with self._lock:
            if isinstance(event, Started):
                self._counters["prompt_tokens"] += event.prompt_tokens
                self._counters["prefix_cache_queries"] += event.prompt_tokens
                self._counters["prefix_cache_hits"] += event.reused_tokens
                self._ids = 0
            elif isinstance(event, Step):
                self._counters["generation_tokens"] += len(event.token_ids)
                self._ids += len(event.token_ids)
                if event.drafted:
                    self._count_cycle(event)
            elif isinstance(event, Finished):
                self._finished[event.reason] = self._finished.get(event.reason, 0) + 1
                self._count_reported(event)

    def first_token(self, seconds: float) -> None:
        with self._lock:
            self._first_token.add(seconds)

    def whole(self, seconds: float) -> None:
        with self._lock:
            self._whole.add(seconds)

    def text(self, model: str, running: int, waiting: int, in_server: bool = False) -> str:
        """All of it, with the gauges of this moment.

        Args:
            in_server: a server of another program writes the replies: what it may not report at all is left out until
                it does.
        """
        labels = f'model_name="{_escaped(model)}",engine="0"'
        with self._lock:
            return "\n".join([*self._lines(labels, running, waiting, in_server), ""])

    def _lines(self, labels: str, running: int, waiting: int, in_server: bool) -> Iterable[str]:
        yield from _head("num_requests_running", "gauge", "Requests being answered.")
        yield f"vllm:num_requests_running{{{labels}}} {running}"
        yield from _head("num_requests_waiting", "gauge", "Requests waiting.")
        yield f"vllm:num_requests_waiting{{{labels}}} {waiting}"
        for name, help_text in COUNTERS.items():
            if in_server and not self._reported(name):
                continue
            yield from _head(f"{name}_total", "counter", help_text)
            yield f"vllm:{name}_total{{{labels}}} {self._counters[name]}"
        if not in_server or self._positions:
            yield from _head(f"{PER_POSITION}_total", "counter", "Accepted drafted tokens by their place in the draft.")
        for position, count in enumerate(self._positions):
            yield f'vllm:{PER_POSITION}_total{{{labels},position="{position}"}} {count}'
        yield from _head("request_success_total", "counter", "Finished requests by reason.")
        for reason, count in sorted(self._finished.items()):
            yield f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {count}'
        yield from _head("time_to_first_token_seconds", "histogram", "From the request to its first token.")
        yield from self._first_token.lines("vllm:time_to_first_token_seconds", labels)
        yield from _head("e2e_request_latency_seconds", "histogram", "From the request to its end.")
        yield from self._whole.lines("vllm:e2e_request_latency_seconds", labels)

    def _reported(self, name: str) -> bool:
        """Whether a server has reported anything of a counter."""
        if name.startswith("spec_decode"):
            return self._counters["spec_decode_num_drafts"] > 0
        return not name.startswith("prefix_cache") or self._counters["prefix_cache_hits"] > 0

    def _count_reported(self, event: Finished) -> None:
        """Count what a server of another program reports of a whole reply only."""
        if not self._ids:
            self._counters["generation_tokens"] += event.usage.completion_tokens
        if event.stats.draft_counts is None:
            return
        cycles, drafted, accepted = event.stats.draft_counts
        self._counters["spec_decode_num_drafts"] += cycles
        self._counters["spec_decode_num_draft_tokens"] += drafted
        self._counters["spec_decode_num_accepted_tokens"] += accepted
        shares = event.stats.acceptance_per_position
        self._positions += [0] * (len(shares) - len(self._positions))
        for position, share in enumerate(shares):
            self._positions[position] += round(share * cycles)

    def _count_cycle(self, step: Step) -> None:
        self._counters["spec_decode_num_drafts"] += 1
        self._counters["spec_decode_num_draft_tokens"] += step.drafted
        self._counters["spec_decode_num_accepted_tokens"] += step.accepted
        self._positions += [0] * (step.drafted - len(self._positions))
        for position in range(step.accepted):
            self._positions[position] += 1


def _head(name: str, kind: str, help_text: str) -> Iterator[str]:
    yield f"# HELP vllm:{name} {help_text}"
    yield f"# TYPE vllm:{name} {kind}"


def _escaped(text: str) -> str:
    """A label's value as Prometheus' text form wants it."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
