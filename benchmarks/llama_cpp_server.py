"""llama.cpp with the pair ``smollm2``: its files made by its own programs, its server, and replies of it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from dflash_local.catalog.bundled import FOLDER
from dflash_local.checkpoint_files.source import needed_config, open_source
from dflash_local.errors import ServerError
from dflash_local.remote.endpoint import Endpoint, within

HOST = "127.0.0.1"
PATIENCE_S = 300.0  # of a start, and of a reply
CONTEXT = 2048
DRAFTER = FOLDER / "smollm2" / "drafter"
LOOKUP = 3  # tokens that llama.cpp's lookup finds again before it drafts what followed
PLAIN, DFLASH = "plain", "dflash"
_COUNTER = re.compile(r"^llamacpp:(\S+) (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply: what it cost and what its drafts were worth.

    Attributes:
        cpu_s: the prompt included. steps: of the target after the prompt, with drafts or not.
        cycles: of these, with drafts. accepted: drafts, uncut where the text ends inside a cycle.
        per_position: cycles in which slot k was accepted.
    """

    kind: str
    ids: tuple[int, ...]
    cpu_s: float
    steps: int
    cycles: int
    accepted: int
    per_position: tuple[int, ...]


def cpu_seconds(process: psutil.Process) -> float:
    """Processor time of all its threads so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def convert(llama_cpp: Path, target: Path, work: Path) -> tuple[Path, Path]:
    """Float32 files of drafter and target in ``work``, made by llama.cpp's own programs."""
    source, folder = open_source(target), work / "target"
    folder.mkdir(parents=True, exist_ok=True)
    parts = source.tokenizer()
    assert parts is not None
    config = {**parts.config, "tokenizer_class": "GPT2Tokenizer", "chat_template": parts.template}
    for name, content in (
        ("config.json", needed_config(source)),
        ("tokenizer.json", parts.spec),
        ("tokenizer_config.json", config),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    drafter, plain = work / "drafter.f32.gguf", work / "target.f32.gguf"
    script = [sys.executable, str(llama_cpp / "convert_hf_to_gguf.py"), str(DRAFTER), "--target-model-dir", str(folder)]
    subprocess.run([*script, "--outtype", "f32", "--outfile", str(drafter)], check=True)
    quantise = [str(llama_cpp / "build/bin/llama-quantize"), "--allow-requantize"]
    subprocess.run([*quantise, str(target), str(plain), "F32"], check=True)
    return drafter, plain


@contextmanager
def served(llama_cpp: Path, options: Sequence[str], log: Path) -> Iterator[tuple[Endpoint, psutil.Process]]:
    """A ``llama-server`` with one slot that answers, and its process; it is ended afterwards."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = str(free.getsockname()[1])
    fixed = ["-c", str(CONTEXT), "-np", "1", "-ctk", "f32", "-ctv", "f32", "--metrics", "--host", HOST, "--port", port]
    with log.open("wb") as said:
        process = subprocess.Popen(
            [str(llama_cpp / "build/bin/llama-server"), *fixed, *options], stdout=said, stderr=subprocess.STDOUT
        )
        try:
            yield _answering(Endpoint(f"http://{HOST}:{port}"), process, log), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(30)


def _answering(server: Endpoint, process: subprocess.Popen[bytes], log: Path) -> Endpoint:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and process.poll() is None:
        try:
            if server.get("/health")[0] == 200:
                return server
        except ServerError:  # it does not listen yet
            pass
        time.sleep(0.2)
    raise SystemExit(f"llama-server did not start (exit code {process.poll()}); its log: {log}")


def counters(server: Endpoint) -> dict[str, int]:
    """What the server has counted since its start, by the names of its metrics page."""
    return {name: round(float(value)) for name, value in _COUNTER.findall(server.get("/metrics")[1].decode())}


def ask(server: Endpoint, process: psutil.Process, kind: str, ids: Sequence[int], tokens: int) -> Reply:
    """One greedy reply of llama.cpp from cold caches."""
    before, began = counters(server), cpu_seconds(process)
    body = {"prompt": list(ids), "n_predict": tokens, "temperature": 0, "cache_prompt": False, "return_tokens": True}
    status, raw = server.fetch("POST", "/completion", within(PATIENCE_S), body)
    answer = json.loads(raw)
    if status != 200:
        raise SystemExit(f"llama-server refuses a prompt: {answer}")
    changed = {name: count - before.get(name, 0) for name, count in counters(server).items()}
    return Reply(
        kind=kind,
        ids=tuple(answer["tokens"]),
        cpu_s=cpu_seconds(process) - began,
        steps=changed["n_decode_total"] - 1,  # the prompt is one
        cycles=changed["spec_decode_num_drafts_total"],
        accepted=changed["spec_decode_num_accepted_tokens_total"],
        per_position=tuple(count for name, count in changed.items() if "per_pos_total{" in name),
    )


def modes(drafter: Path, block: int) -> dict[str, list[str]]:
    """Options of ``llama-server`` by mode."""
    caches = ["-ctkd", "f32", "-ctvd", "f32"]
    size = ["--spec-ngram-simple-size-n", str(LOOKUP), "--spec-ngram-simple-size-m", str(block - 1)]
    return {
        PLAIN: [],
        DFLASH: ["-md", str(drafter), "--spec-type", "draft-dflash", "--spec-draft-n-max", str(block - 1), *caches],
        "lookup": ["--spec-type", "ngram-simple", *size],
    }
