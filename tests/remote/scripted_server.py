"""A loopback server in llama.cpp's own dialect over a made-up model, with faults that can be planted.

The dialect is what llama.cpp's server of October 2026 answered here. The model is a table: the last tokens decide the
scores of the next one, so that a run of any length costs nothing. ``rounding`` moves each score a little, as a pass
over several tokens does.
"""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal

from tests.remote.openai_fake import Server

Fault = Literal["", "swapped", "temperature", "top_p", "accepts", "unsteady"]
VOCABULARY = 24
SEEN = 3  # tokens that decide the next one
SPREAD = 2.0  # of scores
SWAPS = 1000  # one token of so many
LUCK = 0.2  # added to the probability with which a draft is accepted
SLIPS = 0.03  # share of tokens of a server that does not repeat itself


@lru_cache(maxsize=200_000)
def scores(seed: str, last: tuple[int, ...]) -> tuple[float, ...]:
    """Of the next token; no two are equal."""
    chance = random.Random(f"{seed} {last}")
    return tuple(chance.gauss(0, SPREAD) for _ in range(VOCABULARY))


@lru_cache(maxsize=200_000)
def ranked(seed: str, last: tuple[int, ...], rounding: float) -> tuple[tuple[int, float], ...]:
    """Token and log-probability, the likeliest first."""
    own = scores(seed, last)
    if rounding:
        own = tuple(one + rounding * moved / SPREAD for one, moved in zip(own, scores(seed + " rounding", last)))
    whole = math.log(sum(math.exp(one) for one in own))
    return tuple(sorted(((token, one - whole) for token, one in enumerate(own)), key=lambda item: -item[1]))


@dataclass
class ScriptedServer:
    """``seed`` is of the model; two servers of one seed have the same target."""

    seed: str = "model"
    fault: Fault = ""
    drafts: bool = True
    rounding: float = 0.0
    takes_off: bool = False
    model: str = "demo"
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    chance: random.Random = field(default_factory=random.Random)

    def reply(self, prompt: Sequence[int], body: dict[str, Any]) -> Iterator[tuple[int, tuple[tuple[int, float], ...]]]:
        """The tokens of a reply, each with the row that decided it."""
        text = list(prompt)
        limit = body.get("n_predict") or 0
        greedy = body.get("temperature", 0.8) == 0
        top_p = body.get("top_p", 0.95)
        noise = random.Random(f"{self.seed} {body.get('seed')} {self.drafts} {text}")
        faulty = self.drafts and not (self.takes_off and body.get("speculative.n_max") == 0)
        fault = self.fault if faulty else ""
        for at in range(limit):
            row = ranked(self.seed, tuple(text[-SEEN:]), self.rounding if faulty else 0.0)
            if greedy or fault == "temperature":
                token = row[0][0]
                if fault == "swapped" and random.Random(f"swap {text}").randrange(SWAPS) == 0:
                    token = row[5][0]
                if fault == "unsteady" and self.chance.random() < SLIPS:
                    token = row[3][0]
            elif fault == "accepts" and at:
                token = self._drafted(text, row, top_p, noise)
            else:
                token = drawn(row, 0.9 if fault == "top_p" else top_p, noise)
            yield token, row
            text.append(token)

    def _drafted(self, text: list[int], row: tuple[tuple[int, float], ...], top_p: float, noise: random.Random) -> int:
        """Rejection sampling whose draft is accepted too often."""
        draft = ranked(self.seed + " drafter", tuple(text[-SEEN:]), 0.0)[0][0]
        kept = nucleus(row, top_p)
        share = kept.get(draft, 0.0)
        if noise.random() < min(1.0, share + LUCK * (share > 0)):
            return draft
        rest = {token: value for token, value in kept.items() if token != draft} or kept
        return noise.choices(list(rest), list(rest.values()))[0]


def nucleus(row: tuple[tuple[int, float], ...], top_p: float) -> dict[int, float]:
    kept: dict[int, float] = {}
    total = 0.0
    for token, logprob in row:
        kept[token] = math.exp(logprob)
        total += kept[token]
        if total >= top_p:
            break
    return kept


def drawn(row: tuple[tuple[int, float], ...], top_p: float, noise: random.Random) -> int:
    kept = nucleus(row, top_p)
    return noise.choices(list(kept), list(kept.values()))[0]


class ScriptedHandler(BaseHTTPRequestHandler):
    """Answers as llama.cpp does."""

    protocol_version = "HTTP/1.1"
    server_: ScriptedServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        fake = self.server_
        settings = {"params": {"speculative.types": "none"}, "n_ctx": 4096}
        routes: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/v1/models": {"object": "list", "data": [{"id": fake.model, "object": "model"}]},
            "/props": {"default_generation_settings": settings, "build_info": "b11434-x", "endpoint_slots": True},
            "/slots": [{"id": 0, "n_ctx": 4096, "speculative": fake.drafts}],
        }
        found = routes.get(self.path)
        self._answer(404 if found is None else 200, found or {"error": {"message": "File Not Found"}})

    def do_POST(self) -> None:
        fake = self.server_
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.requests.append({"path": self.path, **body})
        if self.path == "/apply-template":
            return self._answer(200, {"prompt": "".join(message["content"] for message in body["messages"])})
        if self.path != "/completion":
            return self._stream(self._openai(body))
        if not body.get("stream"):
            known = {"speculative.n_max": body["speculative.n_max"]} if fake.takes_off else {}
            return self._answer(200, {"content": "a", "generation_settings": known})
        return self._stream(self._own(body))

    def _own(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        prompt = self._ids(body["prompt"])
        count = 0
        for token, row in self.server_.reply(prompt, body):
            count += 1
            event = {"content": f" w{token}", "tokens": [token], "stop": False, "tokens_predicted": count}
            if body.get("n_probs"):
                top = [{"id": one, "logprob": value} for one, value in row[: body["n_probs"]]]
                logprob = dict(row)[token]
                event["completion_probabilities"] = [{"id": token, "logprob": logprob, "top_logprobs": top}]
            yield {**event, "tokens_evaluated": len(prompt)}
        timings = {"predicted_n": count, **({"draft_n": count, "draft_n_accepted": 0} if self.server_.drafts else {})}
        last = {"content": "", "tokens": [], "stop": True, "stop_type": "limit", "tokens_predicted": count}
        yield {**last, "tokens_evaluated": len(prompt), "timings": timings}

    def _openai(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        text = body.get("prompt") or "".join(message["content"] for message in body["messages"])
        for token, _ in self.server_.reply(self._ids(text), {**body, "n_predict": body["max_tokens"]}):
            yield {"choices": [{"index": 0, "delta": {"content": f" w{token}"}, "finish_reason": None}]}
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}

    def _ids(self, prompt: Any) -> list[int]:
        return list(prompt) if isinstance(prompt, list) else [ord(letter) % VOCABULARY for letter in prompt]

    def _stream(self, events: Iterator[dict[str, Any]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def scripted(fake: ScriptedServer, port: int = 0) -> Iterator[ScriptedServer]:
    """Within, the server listens on loopback at ``fake.url``."""
    server = Server(("127.0.0.1", port), type("Handler", (ScriptedHandler,), {"server_": fake}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
