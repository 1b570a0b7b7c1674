"""``dflash race``: one prompt with and without drafting on a loaded pair, by figures of events."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_local.app.default_model import SMALL, is_here, small_pair
from dflash_local.app.examples import FALLBACK_PROMPT, TOY, examples
from dflash_local.app.notices import Notify
from dflash_local.app.reply_text import histogram
from dflash_local.app.resolve import wanted
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.fetch import fetch
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.measuring import check_path, write
from dflash_local.cli.reply import MarkedPrinter, ReplyPrinter, first_interrupt
from dflash_local.cli.run import piped_text
from dflash_local.cli.screen import application, can_show, draw_plainly
from dflash_local.cli.server_options import Origin, TwoServerOptions, compared
from dflash_local.errors import DoesNotFitError, DownloadError, UsageError
from dflash_local.events import Event, Finished, Mode
from dflash_local.load_config import LoadConfig
from dflash_local.request import Limits, Request, SamplingParams, user_request
from dflash_local.service.race import Race, Racer

if TYPE_CHECKING:
    from dflash_local.report.race_file import About
    from dflash_local.service.service import Service

MAX_NEW_TOKENS = 256
TITLES: dict[Mode, str] = {
    "ar": "plain, one token at a time",
    "dflash": "drafted",
}

EXAMPLES = ("dflash race smollm2", 'dflash race smollm2 "Write quicksort in Python" --plain')


def race(
    model: opt.ModelOrDefault = None,
    prompt: Annotated[str, typer.Argument(help="The prompt; a built-in one if not given.")] = "",
    drafter: opt.Drafter = None,
    max_new_tokens: opt.MaxNewTokens = None,
    temperature: opt.Temperature = None,
    seed: opt.Seed = None,
    block_size: opt.BlockSize = None,
    think: opt.Think = None,
    bring: Annotated[bool, typer.Option("--pull", help=f"Download {SMALL} first where no MODEL is given.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Line by line, also where a screen could be shown.")] = False,
    save: Annotated[
        list[Path] | None,
        opt.named("--save", "FILE", "Keep it: FILE.html plays in a browser, FILE.cast in asciinema; FILE.json."),
    ] = None,
    as_json: opt.Json = False,
    *,
    served: TwoServerOptions,
    debug: opt.Debug = False,
    load: LoadConfig,
) -> None:
    """Watch a pair race itself, with and without drafting. Prompt and seed are the same."""
    from dflash_local.app.figures_origin import figures_origin
    from dflash_local.report.race_file import SAVED, About, command

    call = Invocation.begin()
    user, console = call.user, call.console
    for file in save or ():
        _check_file(file)
    text = "\n\n".join(part for part in (prompt, piped_text(sys.stdin)) if part.strip())
    request = user_request(
        text or FALLBACK_PROMPT,
        sampling=SamplingParams(temperature=temperature or 0.0, seed=seed),
        limits=Limits(opt.first(max_new_tokens, user.max_new_tokens, MAX_NEW_TOKENS)),
        block_size=block_size,
    )
    if bring and model in (None, SMALL):
        _bring(call)
    source = compared(call, model, drafter, load, served)
    pair = source.pair
    request = replace(request, thinking=call.thinks(pair, think))
    if not text:  # what a pair can do is known once it is
        text = examples(pair)[0]
        request = replace(request, messages=user_request(text).messages)

    def about(service: Service, result: Race) -> About:
        line = command(pair.name, text, request, result.seed, _options(source, drafter, served))
        return About(pair.label, text, line, figures_origin(service, pair, user, bool(source.models.label)))

    def keep(service: Service, result: Race) -> None:
        for file in save or ():
            write("--save", file, SAVED[file.suffix](result, about(service, result)))
            console.note(f"race saved: {file}", "dim")

    if not plain and not as_json and can_show(console, user.environ):
        shown = application(console, "run_race")
        if shown is not None:
            raise typer.Exit(_on_screen(shown, call, source, request, text, served.order, keep, about))
    with source.service(call) as service:
        racer = _racer(service, pair, request, served.order)
        if not as_json:
            console.data(f"{pair.label}: ", "bold", end="")
            console.data_text(text, "bold")
        result = _run_in_lines(racer, None if as_json else Show(console, marked=not service.load().in_server))
        keep(service, result)
    note = {"note": TOY} if pair.toy else {}
    found = {"pair": pair.name, "prompt": text, **note, **result.as_dict()}
    console.result(found, _conclusion(result, pair, console), as_json)


def _check_file(file: Path) -> None:
    """Refuse before anything is loaded what a race cannot be saved as. UsageError."""
    from dflash_local.report.race_file import SAVED

    if file.suffix not in SAVED:
        *most, last = SAVED
        raise UsageError(f"--save {file}: the ending says no kind of file", f"end it in {', '.join(most)} or {last}")
    check_path("--save", file)


def _options(source: Origin, drafter: str | None, served: TwoServerOptions) -> list[str]:
    """The options that a command repeats the race with; the addresses of servers are left open."""
    own = ["--drafter", drafter] if drafter else []
    if served.url is not None:
        return [*own, "--url", "URL", "--plain-url", "URL"]
    launched = ["--engine", served.engine.value] if source.models.label and served.engine is not None else []
    return [*own, *launched, *source.load.arguments()]


def _on_screen(
    run: Callable[..., Any],
    call: Invocation,
    source: Origin,
    request: Request,
    prompt: str,
    order: tuple[Mode, Mode],
    keep: Callable[[Service, Race], None],
    about: Callable[[Service, Race], About],
) -> int:
    """Run and replay it on a screen; what came of it stays on the terminal. Returns the exit code."""
    pair = source.pair
    draw_plainly()
    with ExitStack() as stack:
        services: list[Service] = []

        def prepare(notify: Notify) -> Racer:
            services.append(stack.enter_context(source.serve(notify)))
            return _racer(services[0], pair, request, order)

        code, result = run(pair.label, prompt, prepare, lambda race: about(services[0], race))
        if result is not None:
            keep(services[0], result)
    if result is not None:
        call.console.lines(_conclusion(result, pair, call.console))
    return int(code)


def _racer(service: Service, pair: Pair, request: Request, order: tuple[Mode, Mode]) -> Racer:
    if not service.load().has_tokenizer:
        raise UsageError(f"{pair.name} has no tokenizer, so it cannot read a prompt")
    return Racer(service, request, order)


def _conclusion(result: Race, pair: Pair, console: Console) -> list[str]:
    bars = histogram(result.dflash.finished, "█" if console.can_show("█") else "#")
    title = ["", "how often each acceptance length (accepted drafts + 1) came:"] if bars else []
    toy = [f"({TOY})"] if pair.toy else []
    return [*table(result), *title, *bars, "", result.verdict, result.ratios, *toy]


def table(result: Race) -> list[str]:
    """The figures of both, in columns."""
    return [
        "",
        f"{'':20s}{'plain':>12s}{'drafted':>12s}",
        *(f"{name:20s}{plain:>12s}{drafted:>12s}" for name, plain, drafted, _ in result.rows),
        f"{'seed':20s}{result.seed:>24d}",
    ]


def _bring(call: Invocation) -> None:
    """Download the small pair where that can be had; the toy runs where it cannot."""
    choice = small_pair(call.user)
    if choice is None or is_here(choice, call.user):
        return
    try:
        fetch(wanted(choice), [choice], call.user, call.console, force=True)
    except (DownloadError, DoesNotFitError) as error:
        call.console.warn(f"{error.message}; the toy pair runs in its place")


def _run_in_lines(racer: Racer, show: Show | None) -> Race:
    """Run a race, printing its replies with ``show``; the first Ctrl-C ends it in order, as Interrupted."""
    with first_interrupt(racer.cancel):
        try:
            return racer.run(show or (lambda _mode, _event: None))
        finally:
            if show is not None:
                show.finish()


class Show:
    """Prints both replies under titles; ``marked``: the target's own tokens of the drafted one in brackets."""

    def __init__(self, console: Console, marked: bool) -> None:
        self._console, self._marked = console, marked
        self._mode: Mode | None = None
        self._printer: ReplyPrinter | None = None

    def __call__(self, mode: Mode, event: Event) -> None:
        if mode != self._mode or self._printer is None:
            self.finish()
            self._mode, self._printer = mode, self._begin(mode)
        self._printer(event)
        if isinstance(event, Finished):
            self.finish()

    def _begin(self, mode: Mode) -> ReplyPrinter:
        marks = MarkedPrinter(self._console) if mode == "dflash" and self._marked else None
        self._console.data()
        self._console.data(f"{TITLES[mode]}{f'; {marks.legend}' if marks else ''}:", "bold")
        return marks or ReplyPrinter(self._console)

    def finish(self) -> None:
        if self._printer is not None:
            self._printer.finish()
            self._printer = None
