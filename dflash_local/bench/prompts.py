"""The prompts a measurement runs over: built-in, held out with a bundled pair, or the user's file. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_local.errors import CheckpointError, UsageError
from dflash_local.json_text import parse_json
from dflash_local.request import MAX_MESSAGE_CHARS

MAX_FILE_BYTES = 64 * 2**20
MAX_PROMPTS = 100_000
FEW = 6  # prompts a certificate takes from a longer list

BUILT_IN: tuple[tuple[str, str], ...] = (
    ("code", "Write a Python function that returns the n-th Fibonacci number, with a short docstring."),
    ("maths", "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Explain each step."),
    ("text", "Explain in a few sentences why the sky is blue."),
    ("table", "Make a markdown table of the four seasons with one typical fruit for each."),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as text or as ids; ``answer``: the right reply of a held-out prompt, None where it is not known."""

    kind: str
    text: str = ""
    ids: tuple[int, ...] = ()
    answer: str | None = None


def built_in() -> tuple[Prompt, ...]:
    """A few prompts any instruction model can answer."""
    return tuple(Prompt(kind, text) for kind, text in BUILT_IN)


def held_out(file: Path) -> tuple[Prompt, ...]:
    """The prompts a bundled pair was not trained on: a JSON list of ``{kind, prompt, answer}``. CheckpointError."""
    hint = "install dflash-local again"
    try:
        rows = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing from this installation", hint) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", hint) from error
    if not isinstance(rows, list) or not rows:
        raise CheckpointError(f"{file} holds no prompts", hint)
    return tuple(_prompt(row, f"{file}, entry {number}") for number, row in enumerate(rows, 1))


def from_file(file: Path) -> tuple[Prompt, ...]:
    """The user's prompts, one JSON object a line: ``prompt`` or ``prompt_ids``, ``kind``. UsageError."""
    prompts = tuple(_prompt(row, where) for row, where in json_lines(file))
    if not prompts or len(prompts) > MAX_PROMPTS:
        raise UsageError(f"{file} holds {len(prompts)} prompts, 1 to {MAX_PROMPTS} are taken")
    return prompts


def json_lines(file: Path) -> Iterator[tuple[Any, str]]:
    """What the lines of a file say, and where each is, for messages. UsageError: a line is no JSON, or none is read."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--prompts {file}: {error.strerror}", "heldout, builtin, or a .jsonl file") from error
    if len(raw) > MAX_FILE_BYTES:
        raise UsageError(f"{file} is larger than {MAX_FILE_BYTES >> 20} MiB")
    for number, line in enumerate(raw.decode("utf-8-sig", "replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise UsageError(f"{file}, line {number} is not JSON: {error}", 'lines like {"prompt": "..."}') from error
        yield row, f"{file}, line {number}"


def _prompt(row: object, where: str) -> Prompt:
    if not isinstance(row, dict):
        raise UsageError(f"{where} is not an object", 'lines like {"prompt": "..."}')
    text, ids = row.get("prompt", ""), row.get("prompt_ids") or []
    kind, answer = row.get("kind") or "all", row.get("answer")
    if not isinstance(text, str) or len(text) > MAX_MESSAGE_CHARS or not isinstance(kind, str):
        raise UsageError(f"{where}: prompt and kind must be text")
    if answer is not None and not isinstance(answer, str):
        raise UsageError(f"{where}: answer must be text, got {type(answer).__name__}")
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise UsageError(f"{where}: prompt_ids must be a list of whole numbers")
    if bool(text.strip()) == bool(ids):
        raise UsageError(f"{where}: give either prompt or prompt_ids")
    return Prompt(kind, text, tuple(ids), answer)


def a_few(prompts: Sequence[Prompt], count: int = FEW) -> tuple[Prompt, ...]:
    """At most ``count`` of the prompts: one of each kind first, then evenly spaced ones."""
    firsts = {prompt.kind: prompt for prompt in reversed(prompts)}
    chosen = [prompt for prompt in prompts if firsts[prompt.kind] is prompt][:count]
    rest = [prompt for prompt in prompts if prompt not in chosen]
    wanted = min(count - len(chosen), len(rest))
    chosen += [rest[i * len(rest) // wanted] for i in range(wanted)]
    return tuple(chosen)
