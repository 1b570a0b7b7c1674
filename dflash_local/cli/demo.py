"""``dflash demo``: the toy pair on a built-in prompt, first without and then with its drafter.

Both runs use the same loaded session; every figure comes from their events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from dflash_local import settings, terminal
from dflash_local.catalog.bundled import BUNDLED, FOLDER, Pair, find
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.reply import Reply, ReplyPrinter, figures, follow
from dflash_local.cli.session import load_wish, start_service
from dflash_local.cli.talk import histogram
from dflash_local.errors import Interrupted, UsageError
from dflash_local.events import Event, Mode, Step
from dflash_local.request import Limits, Request, user_request
from dflash_local.service.service import Service

PROMPTS = FOLDER / "prompts.json"
FALLBACK_PROMPT = "Write a Python function that returns the sum of a list of numbers."
MAX_NEW_TOKENS = 256
WARM_UP_TOKENS = 16
TOY = "toy pair: first-run material, not a speed claim"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo)


def demo(
    pair_name: Annotated[str, typer.Argument(metavar="[PAIR]", help=f"One of: {', '.join(BUNDLED)}.")] = "demo",
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Watch a toy pair write the same text without and with its drafter."""
    user = settings.load()
    console = Console(user.environ)
    if pair_name not in BUNDLED:
        raise UsageError(f"{pair_name!r} is not a bundled pair", f"one of: {', '.join(BUNDLED)}")
    pair = find(pair_name)
    wish = load_wish(user, dtype=dtype, device=device)
    prompt = built_in_prompt()
    with start_service(pair, wish, console) as service:
        _warm_up(service, prompt)
        if as_json:
            plain, drafted = (_run(service, prompt, mode, None) for mode in ("ar", "dflash"))
            console.json(comparison(pair, prompt, plain, drafted))
            return
        console.data(f"{pair.label}: {prompt}", "bold")
        console.data("\nwithout drafting, one token at a time (ar):", "bold")
        plain = _run(service, prompt, "ar", ReplyPrinter(console))
        console.data(figures(plain.finished), "dim")
        marks = MarkedPrinter(console)
        console.data(f"\nwith the drafter (dflash); {marks.legend}:", "bold")
        drafted = _run(service, prompt, "dflash", marks)
        console.data(figures(drafted.finished), "dim")
        _conclude(console, comparison(pair, prompt, plain, drafted), drafted)


def built_in_prompt() -> str:
    """The prompt of the demonstration."""
    try:
        prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return FALLBACK_PROMPT
    prompt = prompts.get("demo") if isinstance(prompts, dict) else None
    return prompt if isinstance(prompt, str) and prompt.strip() else FALLBACK_PROMPT


class MarkedPrinter:
    """Prints a reply with the target's own tokens in brackets, and in colour where there is any."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._filter = terminal.TerminalFilter()
        self._open, self._close = ("‹", "›") if console.can_show("‹›") else ("[", "]")
        self._line_end, self._space = ("↵", "␣") if console.can_show("↵␣") else ("\\n", " ")
        self._ends_line = True

    @property
    def legend(self) -> str:
        """What the marks mean."""
        return f"drafted and accepted, {self._open}chosen by the target itself{self._close}"

    def __call__(self, event: Event) -> None:
        if isinstance(event, Step):
            for piece in event.pieces:
                text = self._filter.feed(piece.text)
                if text and piece.origin == "bonus":
                    self._bonus(text)
                elif text:
                    self._put(text, "green")

    def finish(self) -> None:
        """Show what was held back and end the line."""
        self._put(self._filter.finish(), "")
        if not self._ends_line:
            self._console.raw("\n")

    def _bonus(self, text: str) -> None:
        """Brackets stand around the visible part, or a sign for what has none, so that a line end stays one."""
        core = text.strip()
        before, _, after = text.partition(core) if core else ("", "", text)
        if not core:
            core, after = (self._line_end, text) if "\n" in text else (self._space, text[1:])
        self._put(before, "")
        self._put(f"{self._open}{core}{self._close}", "yellow")
        self._put(after, "")

    def _put(self, text: str, style: str) -> None:
        if text:
            self._console.raw(text, style)
            self._ends_line = text.endswith("\n")


def comparison(pair: Pair, prompt: str, plain: Reply, drafted: Reply) -> dict[str, Any]:
    """Both runs side by side, as ``--json`` prints it. Ratios are of this very run."""
    same = plain.token_ids == drafted.token_ids
    shortest = min(len(plain.token_ids), len(drafted.token_ids))
    first = next((i for i in range(shortest) if plain.token_ids[i] != drafted.token_ids[i]), shortest)
    return {
        "pair": pair.name,
        "note": TOY,
        "prompt": prompt,
        "text": drafted.text,
        "identical": same,
        "first_difference": None if same else first,
        "decode_ratio": _ratio(drafted.finished.stats.tokens_per_s, plain.finished.stats.tokens_per_s),
        "wall_clock_ratio": _ratio(_wall(plain), _wall(drafted)),
        "ar": _figures(plain),
        "dflash": _figures(drafted),
    }


def _run(service: Service, prompt: str, mode: Mode, show: ReplyPrinter | MarkedPrinter | None) -> Reply:
    try:
        reply = follow(service.submit(_request(prompt, mode, MAX_NEW_TOKENS)), show or (lambda _event: None))
    finally:
        if show is not None:
            show.finish()
    if reply.stopped:
        raise Interrupted("interrupted")
    return reply


def _warm_up(service: Service, prompt: str) -> None:
    """What is paid once (first kernels, memory) would be charged to the run that comes first."""
    modes: tuple[Mode, ...] = ("ar", "dflash")
    for mode in modes:
        if follow(service.submit(_request(prompt, mode, WARM_UP_TOKENS)), lambda _event: None).stopped:
            raise Interrupted("interrupted")


def _request(prompt: str, mode: Mode, tokens: int) -> Request:
    return user_request(prompt, limits=Limits(tokens), mode=mode)


def _conclude(console: Console, result: Mapping[str, Any], drafted: Reply) -> None:
    console.data("\ncycles by acceptance length (accepted drafts + 1):", "bold")
    for line in histogram(drafted.finished, "█" if console.can_show("█") else "#"):
        console.data(line)
    if result["identical"]:
        console.data("\nidentical: yes")
    else:
        console.data(f"\nidentical: no, from token {result['first_difference']} on; dflash certify says why")
    console.data(f"this run: {result['wall_clock_ratio']:.2f}x wall clock, {result['decode_ratio']:.2f}x decode speed")
    console.data(f"({TOY})")


def _figures(reply: Reply) -> dict[str, Any]:
    stats = reply.finished.stats
    return {
        "token_ids": list(reply.token_ids),
        "acceptance_lengths": list(stats.acceptance_lengths),
        "mean_acceptance_length": stats.mean_acceptance_length,
        "turn_acceptance_length": stats.turn_acceptance_length,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "tokens_per_s": stats.tokens_per_s,
        "end_to_end_tokens_per_s": stats.end_to_end_tokens_per_s,
        "block_size": stats.block_size,
        "finish_reason": reply.finished.reason,
    }


def _wall(reply: Reply) -> float:
    return reply.finished.stats.prefill_s + reply.finished.stats.decode_s


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
