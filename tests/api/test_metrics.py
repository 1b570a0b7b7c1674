"""Prometheus' text form under vLLM's names."""

from __future__ import annotations

import re

from dflash_local.api.metrics import Metrics
from dflash_local.events import Finished, Started, Step, Usage
from dflash_local.request import Request
from tests.api.conftest import Running, Serve, wait_until
from tests.service.scripted import STATS, ScriptedSession

LINE = re.compile(
    r'(?:vllm|dflash):([a-z0-9_]+)\{engine="0",(?:([a-z_]+)="([^"]*)",)?model_name="scripted"'
    r'(?:,(?:position|place)="(\w+)")?\} ([0-9.e+-]+)'
)
NAMES = {
    *("num_requests_running", "num_requests_waiting", "prompt_tokens_total", "generation_tokens_total"),
    *("time_to_first_token_seconds_bucket", "e2e_request_latency_seconds_bucket", "request_success_total"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    *("spec_decode_num_accepted_tokens_per_pos_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
}


def samples(server: Running) -> dict[tuple[str, str], float]:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for line in answer.body.decode().splitlines():
        if not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert match, f"no sample: {line}"
            found[match[1], match[3] or match[4] or ""] = float(match[5])
    return found


def test_the_counters_say_what_happened(serve: Serve) -> None:
    server = serve(ScriptedSession())
    assert server.chat().status == server.chat(stream=True).status == 200
    wait_until(lambda: server.service.status.running == 0)  # a client may have its answer a moment before
    found = samples(server)
    assert NAMES <= {name for name, _ in found}
    assert found["prompt_tokens_total", ""] == 10 and found["generation_tokens_total", ""] == 12
    assert found["spec_decode_num_drafts_total", ""] == 4
    assert found["spec_decode_num_draft_tokens_total", ""] == 12
    assert found["spec_decode_num_accepted_tokens_total", ""] == 6
    per_position = [found["spec_decode_num_accepted_tokens_per_pos_total", str(at)] for at in range(3)]
    assert per_position == [4, 2, 0] and sum(per_position) == 6
    assert found["e2e_request_latency_seconds_bucket", "+Inf"] == found["e2e_request_latency_seconds_count", ""] == 2
    assert found["time_to_first_token_seconds_count", ""] == 2
    assert [found["held_tokens", place] for place in ("device", "host", "disk")] == [700, 3000, 0]
    assert found["held_sequences", "host"] == 2 and found["held_bytes", "host"] == 4000
    assert found["num_requests_running", ""] == found["num_requests_waiting", ""] == 0


def test_reused_tokens_are_cache_hits_and_names_are_escaped() -> None:
    metrics = Metrics()
    request = Request(prompt="x")
    metrics.observe(request, Started(10, 7, 0.1))
    metrics.observe(request, Step((), (1, 2), 7, 1, 8, 0.1))
    text = metrics.text('a"b\\c\nd', 1, 2)
    assert 'model_name="a\\"b\\\\c\\nd"' in text and "\nd" not in text
    assert re.search(r"prefix_cache_hits_total\{[^}]*\} 7.0\n", text)
    assert re.search(r"num_requests_waiting\{[^}]*\} 2.0\n", text)


def test_tokens_of_replies_that_take_turns_are_counted_once() -> None:
    metrics, (first, other) = Metrics(), (Request(prompt="x"), Request(prompt="y"))
    ends = Finished("stop", Usage(1, 2), STATS)
    for request in (first, other):
        metrics.observe(request, Started(1, 0, 0.1))
        metrics.observe(request, Step((), (1, 2), 0, 0, 1, 0.1))
    metrics.observe(third := Request(prompt="z"), Started(1, 0, 0.1))
    for request in (first, other, third):  # the last one's tokens were not named, as by some servers
        metrics.observe(request, ends)
    assert re.search(r"generation_tokens_total\{[^}]*\} 6.0\n", metrics.text("one", 0, 0))
