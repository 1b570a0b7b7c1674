"""The figures of the benchmark beside llama.cpp: what is read of its server, and what is made of replies."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest

pytest.importorskip("torch")
from benchmarks import llama_cpp_server, peer_llama_cpp  # noqa: E402
from benchmarks.llama_cpp_server import Reply  # noqa: E402
from dflash_local.remote.endpoint import Endpoint  # noqa: E402

PAGES = (
    'llamacpp:n_decode_total 4\nllamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 1\n'
    "llamacpp:spec_decode_num_drafts_total 2\nllamacpp:spec_decode_num_accepted_tokens_total 2\n",
    "# HELP llamacpp:n_decode_total calls\nllamacpp:n_decode_total 8\n"
    'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 3\n'
    'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2\n'
    "llamacpp:spec_decode_num_drafts_total 4\nllamacpp:spec_decode_num_accepted_tokens_total 6\n",
)


@pytest.fixture
def server() -> Iterator[Endpoint]:
    """One that has counted two requests, one before and one in the test."""
    pages = iter(PAGES)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(next(pages).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["prompt"] == [5, 6] and body["temperature"] == 0 and not body["cache_prompt"]
            self._answer(b'{"tokens": [1, 2, 3, 4, 5, 6, 7]}')

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield Endpoint(f"http://127.0.0.1:{http.server_port}")
        http.shutdown()


def test_a_reply_counts_what_changed_on_the_metrics_page(server: Endpoint) -> None:
    reply = llama_cpp_server.ask(server, psutil.Process(), "code", [5, 6], 7)
    assert reply.ids == (1, 2, 3, 4, 5, 6, 7)
    assert (reply.steps, reply.cycles, reply.accepted, reply.per_position) == (3, 2, 4, (2, 2))


def replies(*texts: tuple[int, ...], steps: int, cycles: int) -> list[Reply]:
    return [Reply("code", ids, 2.0, steps, cycles, cycles, (cycles,) if cycles else ()) for ids in texts]


def test_the_table_tells_texts_and_steps_apart() -> None:
    same, other = (1, 2, 3, 4, 5), (1, 2, 9, 9, 9)
    runs = {
        "dflash-local float32 plain": replies(same, same, steps=4, cycles=0),
        "dflash-local float32 dflash": replies(same, same, steps=2, cycles=2),
        "llama.cpp float32 plain": replies(same, other, steps=4, cycles=0),
        "llama.cpp float32 dflash": replies(same, same, steps=2, cycles=2),
    }
    lines = peer_llama_cpp.lines(runs)
    assert lines[2].split()[3:] == ["10", "2.000", "2.000", "2.5", "1.00x", "2/2", "2/2"]
    assert lines[3].split()[3:] == ["10", "1.000", "-", "2.5", "1.00x", "2/2", "1/2"]
    assert lines[4].split()[3:] == ["10", "2.000", "2.000", "2.5", "1.00x", "1/2", "2/2"]
    assert lines[-1].endswith("in 2 of 2: 2.000 and 2.000 tokens a step, as many steps in 2")
    assert peer_llama_cpp.parting(runs["llama.cpp float32 plain"][1], runs["llama.cpp float32 dflash"][1]) == 2
