"""Counters and histograms of all requests, in Prometheus' text form under vLLM's names.

Names as in https://docs.vllm.ai/en/stable/design/metrics/ so that its dashboards fit; ``position`` counts from 0.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

from dflash_local.events import Event, Finished, Started, Step
from dflash_local.loaded import HeldCount
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
HELD = {"sequences": "Number", "tokens": "Tokens", "bytes": "Bytes"}  # by their place: device, host, disk


class Metrics:
    """The figures of one server. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a reply's end is counted whole
        self._named = set[int]()  # requests whose tokens were named
        self._registry = registry = CollectorRegistry()

        def named(kind: Any, name: str, help_text: str, labels: tuple[str, ...] = (), **more: Any) -> Any:
            return kind(f"vllm:{name}", help_text, labels, registry=registry, **more)

        self._running = named(Gauge, "num_requests_running", "Requests being answered.")
        self._waiting = named(Gauge, "num_requests_waiting", "Requests waiting.")
        self._held = {
            name: Gauge(f"dflash:held_{name}", f"{what} of conversations to go on from.", ("place",), registry=registry)
            for name, what in HELD.items()
        }
        self._counters = {name: named(Counter, name, help_text) for name, help_text in COUNTERS.items()}
        places = "Accepted drafted tokens by their place in the draft."
        self._positions = named(Counter, "spec_decode_num_accepted_tokens_per_pos", places, ("position",))
        self._finished = named(Counter, "request_success", "Finished requests by reason.", ("finished_reason",))
        first, whole = "From the request to its first token.", "From the request to its end."
        self._first_token = named(Histogram, "time_to_first_token_seconds", first, buckets=TTFT_BUCKETS)
        self._whole = named(Histogram, "e2e_request_latency_seconds", whole, buckets=E2E_BUCKETS)

    def observe(self, request: Request, event: Event) -> None:
        """Count an event as the engine emits it, before slow readers see several as one."""
        with self._lock:
            if isinstance(event, Started):
                self._add("prompt_tokens", event.prompt_tokens)
                self._add("prefix_cache_queries", event.prompt_tokens)
                self._add("prefix_cache_hits", event.reused_tokens)
                self._named.discard(id(request))
            elif isinstance(event, Step):
                self._add("generation_tokens", len(event.token_ids))
                self._named.update([id(request)] if event.token_ids else ())
                if event.drafted:
                    self._count_drafts(1, event.drafted, event.accepted)
                    for position in range(event.drafted):
                        self._positions.labels(position).inc(position < event.accepted)
            elif isinstance(event, Finished):
                self._finished.labels(event.reason).inc()
                self._count_reported(event, id(request) in self._named)
                self._named.discard(id(request))

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def whole(self, seconds: float) -> None:
        self._whole.observe(seconds)

    @property
    def reused_tokens(self) -> int:
        """Count prompt tokens that were not run again."""
        return int(self._registry.get_sample_value("vllm:prefix_cache_hits_total") or 0)

    def text(
        self, model: str, running: int, waiting: int, in_server: bool = False, held: Sequence[HeldCount] = ()
    ) -> str:
        """Return all of it, with the gauges of this moment.

        Args:
            in_server: a server of another program writes the replies: what it may not report at all is left out until
                it does.
            held: of conversations; vLLM has no names for them.
        """
        for each in held:
            counts = {"sequences": each.sequences, "tokens": each.tokens, "bytes": each.bytes}
            for name, count in counts.items():
                if count is not None:
                    self._held[name].labels(each.place).set(count)
        self._running.set(running)
        self._waiting.set(waiting)
        families = self._labelled({"model_name": model, "engine": "0"}, in_server)
        collected: Any = type("Collected", (), {"collect": lambda _: families})()
        return generate_latest(collected).decode()

    def _labelled(self, labels: dict[str, str], in_server: bool) -> Iterator[Metric]:
        signs = {"vllm:spec_decode": "spec_decode_num_drafts", "vllm:prefix_cache": "prefix_cache_hits"}
        silent = [start for start, name in signs.items() if not self._registry.get_sample_value(f"vllm:{name}_total")]
        for family in self._registry.collect():
            if not (in_server and family.name.startswith(tuple(silent))):
                kept = [sample for sample in family.samples if not sample.name.endswith("_created")]
                family.samples = [sample._replace(labels={**labels, **sample.labels}) for sample in kept]
                yield family

    def _add(self, name: str, count: int) -> None:
        self._counters[name].inc(count)

    def _count_drafts(self, cycles: int, drafted: int, accepted: int) -> None:
        self._add("spec_decode_num_drafts", cycles)
        self._add("spec_decode_num_draft_tokens", drafted)
        self._add("spec_decode_num_accepted_tokens", accepted)

    def _count_reported(self, event: Finished, named: bool) -> None:
        """Count what a server of another program reports of a whole reply only."""
        if not named:
            self._add("generation_tokens", event.usage.completion_tokens)
        if event.stats.draft_counts is not None:
            cycles, drafted, accepted = event.stats.draft_counts
            self._count_drafts(cycles, drafted, accepted)
            for position, share in enumerate(event.stats.acceptance_per_position):
                self._positions.labels(position).inc(round(share * cycles))
