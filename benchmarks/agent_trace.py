"""An agent's conversation through the endpoint: what each turn prefills again, and DFlash against plain decoding.

    PYTHONPATH=. python3 benchmarks/agent_trace.py [--turns 20] [--out FILE] [MODEL ...]

Starts ``dflash serve`` for each pair, plays one task and its tool results turn by turn, once with drafting and once
without, and prints what the replies say of themselves. The bundled toys are the default: their ratio is no claim.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_local.bench import provenance, report
from dflash_local.catalog.bundled import BUNDLED
from dflash_local.store.atomic import write_atomic

START_S = 120.0
TASK = "Count from 3 to 7."
RESULTS = ("count from {a} to {b}", "What are the even numbers between {a} and {b}?", "Write 'oak' in capital letters.")
TOKENS = 48


@contextmanager
def served(model: str, environ: Mapping[str, str] | None = None, log: Path | None = None) -> Iterator[str]:
    """The address of a ``dflash serve`` of its own home.

    Args:
        environ: added to this process's own. log: the file that gets what the server says.
    """
    with tempfile.TemporaryDirectory() as home, open(log or os.devnull, "wb") as said:
        command = [sys.executable, "-m", "dflash_local", "serve", model, "--port", "0"]
        own = {**os.environ, **(environ or {}), "DFLASH_HOME": home}
        process = subprocess.Popen(command, env=own, stderr=said)
        try:
            yield _address(Path(home) / "cache", process)
        finally:
            process.terminate()
            process.wait(30)


def _address(cache: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            (record,) = cache.glob("serve-*.json")
            return str(json.loads(record.read_text(encoding="utf-8"))["url"])
        except (OSError, ValueError):  # it is not there yet, or not yet whole
            time.sleep(0.05)
    raise SystemExit(f"dflash serve did not start (exit code {process.poll()})")


def ask(url: str, model: str, messages: Sequence[dict[str, Any]], mode: str) -> dict[str, Any]:
    """One completion, greedy."""
    body = {"model": model, "messages": list(messages), "temperature": 0, "max_tokens": TOKENS, "mode": mode}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def play(url: str, model: str, turns: int, mode: str) -> list[dict[str, Any]]:
    """The whole trace in one mode, on caches that begin cold: another conversation comes first."""
    ask(url, model, [{"role": "user", "content": f"Spell the word cold, {mode}."}], mode)
    messages: list[dict[str, Any]] = [{"role": "user", "content": TASK}]
    rows: list[dict[str, Any]] = []
    before = 0
    for turn in range(turns):
        answer = ask(url, model, messages, mode)
        text = answer["choices"][0]["message"]["content"]
        usage, figures = answer["usage"], answer["metrics"]
        prompt, reused = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        rows.append(
            {
                "turn": turn + 1,
                "text": text,
                "prompt": prompt,
                "reused": reused,
                "prefilled": prompt - reused,
                # What came since the last prompt: the reply, this message, and their markup.
                "new": prompt - before,
                "tokens": usage["completion_tokens"],
                "ms": figures["time_to_first_token_ms"] + figures["generation_time_ms"],
                "acceptance": figures["speculative_decoding"]["mean_acceptance_length"] if mode == "dflash" else None,
            }
        )
        before = prompt
        content = RESULTS[turn % len(RESULTS)].format(a=turn + 1, b=turn + 6)
        messages += [
            {"role": "assistant", "content": text},
            {"role": "tool", "tool_call_id": f"call{turn}", "content": content},
        ]
    return rows


def compared(model: str, turns: int) -> dict[str, Any]:
    """Both modes of one pair."""
    with served(model) as url:
        drafted, plain = (play(url, model, turns, mode) for mode in ("dflash", "ar"))
    return {"model": model, "dflash": drafted, "ar": plain}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The table of one pair."""
    yield f"{found['model']}: {len(found['dflash'])} turns, greedy, {TOKENS} tokens a turn at most"
    rows = [
        (
            str(drafted["turn"]),
            str(drafted["prompt"]),
            str(drafted["reused"]),
            str(drafted["prefilled"]),
            str(drafted["new"]),
            str(drafted["tokens"]),
            f"{drafted['acceptance'] or 0:.2f}",
            f"{drafted['ms']:.0f}",
            f"{plain['ms']:.0f}",
            f"{plain['ms'] / drafted['ms']:.2f}x",
            "yes" if drafted["text"] == plain["text"] else "NO",
        )
        for drafted, plain in zip(found["dflash"], found["ar"], strict=True)
    ]
    head = (
        "turn",
        "prompt",
        "reused",
        "prefilled",
        "new",
        "tokens",
        "accepted",
        "DFlash ms",
        "AR ms",
        "ratio",
        "equal",
    )
    yield from report.table(head, rows)
    total = {mode: sum(row["ms"] for row in found[mode]) for mode in ("dflash", "ar")}
    again = sum(max(0, row["prefilled"] - row["new"]) for row in found["dflash"])
    yield f"in all {total['ar'] / total['dflash']:.2f}x; {again} tokens prefilled beyond what was new to the prompt"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=list(BUNDLED), metavar="MODEL")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args(arguments)
    found = [compared(model, args.turns) for model in args.models]
    for one in found:
        print("\n".join(lines(one)), end="\n\n")
    if args.out:
        results = {"report": "agent trace through the endpoint", "machine": provenance.machine(), "pairs": found}
        write_atomic(args.out, json.dumps(results, indent=1) + "\n", 0o644)
    return 0 if all(d["text"] == a["text"] for one in found for d, a in zip(one["dflash"], one["ar"])) else 1


if __name__ == "__main__":
    sys.exit(main())
