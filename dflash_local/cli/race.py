"""``dflash race``: one prompt with and without drafting on one loaded pair; side by side on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from dflash_local.app.examples import TOY, built_in_prompt
from dflash_local.app.loading import start_service
from dflash_local.app.notices import Notify
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.demo import Show, run_in_lines
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.load_options import add_command
from dflash_local.cli.reply import ReplyPrinter
from dflash_local.cli.run import piped_text
from dflash_local.cli.screen import application, can_show, draw_plainly
from dflash_local.errors import UsageError
from dflash_local.events import Mode
from dflash_local.load_config import LoadConfig
from dflash_local.request import Limits, Request, SamplingParams, user_request
from dflash_local.service.race import Lane, Race, Racer
from dflash_local.service.service import Service

MAX_NEW_TOKENS = 256
TITLES: dict[Mode, str] = {
    "ar": "without drafting, one token at a time (ar):",
    "dflash": "with the drafter (dflash):",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "race", race)


def race(
    model: opt.ModelOrDemo = None,
    prompt: Annotated[str, typer.Argument(help="The prompt; a built-in one if not given.")] = "",
    drafter: opt.Drafter = None,
    max_new_tokens: opt.MaxNewTokens = None,
    temperature: opt.Temperature = None,
    seed: opt.Seed = None,
    block_size: opt.BlockSize = None,
    think: opt.Think = None,
    plain: Annotated[bool, typer.Option("--plain", help="Line by line, also where a screen could be shown.")] = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Watch a pair race itself: the same prompt and seed with and without drafting."""
    call = Invocation.begin()
    user, console = call.user, call.console
    text = "\n\n".join(part for part in (prompt, piped_text(sys.stdin)) if part.strip()) or built_in_prompt()
    request = user_request(
        text,
        sampling=opt.sampling(SamplingParams(), temperature=temperature, seed=seed),
        limits=Limits(opt.first(max_new_tokens, user.max_new_tokens, MAX_NEW_TOKENS)),
        block_size=block_size,
    )
    pair = call.pair(model or user.model or "demo", drafter, load)
    request = replace(request, thinking=call.thinks(pair, think))
    contest = Contest(call, pair, load, request, text)
    if not plain and not as_json and can_show(console, user.environ):
        shown = application(console, "run_race")
        if shown is not None:
            raise typer.Exit(contest.on_screen(shown))
    contest.in_lines(as_json)


@dataclass(frozen=True, slots=True)
class Contest:
    """What races, and how it is shown."""

    call: Invocation
    pair: Pair
    load: LoadConfig
    request: Request
    prompt: str

    def in_lines(self, as_json: bool) -> None:
        """Both replies one below the other and a table, or one JSON object.

        Raises:
            Interrupted: Ctrl-C. DFlashError: a reply failed.
        """
        console = self.call.console
        with self.call.start(self.pair, self.load) as service:
            racer = self._racer(service)
            if not as_json:
                console.data(f"{self.pair.label}: ", "bold", end="")
                console.data_text(self.prompt, "bold")
            result = run_in_lines(racer, None if as_json else PlainShow(console))
        if as_json:
            console.json({**self._about, **result.as_dict()})
        else:
            self._conclude(result)

    def on_screen(self, run: Callable[..., Any]) -> int:
        """Run and replay it on a screen; what came of it stays on the terminal. Returns the exit code.

        Raises:
            DFlashError: the pair could not be loaded, or a reply failed.
        """
        draw_plainly()
        with ExitStack() as stack:

            def prepare(notify: Notify) -> Racer:
                return self._racer(stack.enter_context(start_service(self.pair, self.load, self.call.user, notify)))

            code, result = run(self.pair.label, self.prompt, prepare)
        if result is not None:
            self._conclude(result)
        return int(code)

    @property
    def _about(self) -> dict[str, Any]:
        about: dict[str, Any] = {"pair": self.pair.name, "prompt": self.prompt}
        return {**about, "note": TOY} if self.pair.toy else about

    def _racer(self, service: Service) -> Racer:
        if not service.facts.has_tokenizer:
            raise UsageError(f"{self.pair.name} has no tokenizer, so it cannot read a prompt")
        return Racer(service, self.request)

    def _conclude(self, result: Race) -> None:
        console = self.call.console
        for line in table(result):
            console.data(line)
        console.data(result.verdict)
        console.data(result.ratios)
        if self.pair.toy:
            console.data(f"({TOY})")


class PlainShow(Show):
    """Prints both replies, each under its title; the table comes after them."""

    with_figures = False

    def begin(self, mode: Mode) -> ReplyPrinter:
        """The title, and what prints the reply."""
        self.console.data()
        self.console.data(TITLES[mode], "bold")
        return ReplyPrinter(self.console)


def table(result: Race) -> list[str]:
    """The figures of both, in columns."""

    def row(name: str, show: Callable[[Lane], str]) -> str:
        return f"{name:20s}{show(result.ar):>12s}{show(result.dflash):>12s}"

    def acceptance(lane: Lane) -> str:
        length = lane.finished.stats.mean_acceptance_length
        return "-" if length is None or lane.mode == "ar" else f"{length:.2f}"

    return [
        "",
        f"{'':20s}{'ar':>12s}{'dflash':>12s}",
        row("time", lambda lane: f"{lane.seconds:.2f} s"),
        row("tokens", lambda lane: str(len(lane.token_ids))),
        row("tok/s", lambda lane: f"{lane.finished.stats.tokens_per_s:.1f}"),
        row("acceptance length", acceptance),
        f"{'seed':20s}{result.seed:>24d}",
    ]
