"""What can be known of the text of a drafting server: greedy replies beside those of a server that does not draft.

Nothing behind the replies is seen: not the dtype, not the noise of the machine, not the logits that chose. So the
levels of our own certificate (docs/exactness.md) are not claimed here.
"""

from __future__ import annotations

import os.path
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal

from dflash_local import __version__, tables
from dflash_local.app.examples import TOY
from dflash_local.bench.prompts import Prompt
from dflash_local.catalog.bundled import Pair
from dflash_local.checkpoint_files.source import is_on_disk
from dflash_local.errors import DFlashError, ExactnessError, Interrupted
from dflash_local.events import Event, Mode, Notice
from dflash_local.request import Limits, Request, user_request
from dflash_local.service.race import NEAR_TIE, Loaded, Race, Racer

if TYPE_CHECKING:
    from dflash_local.remote.server_checks import ServerFacts

SCHEMA = 1
SHOWN = 24  # characters of each text from the first difference on
Verdict = Literal["equal", "near-tie", "unknown", "wide"]
ORDER_OF_REPLIES: tuple[Mode, Mode] = ("dflash", "ar")  # the plain server is asked for margins in the end
ORDER: tuple[Verdict, ...] = ("equal", "near-tie", "unknown", "wide")
TITLES = ("prompt", "tokens", "per cycle", "verdict")
PROMISE = (
    "Greedy replies of two servers were compared, token by token where they name tokens, else as texts. A first "
    f"difference is judged by the plain server's log probabilities alone: over {NEAR_TIE:g} it is wider than any "
    "near-tie; within that it is as near-ties are, which is no proof of one, since dtype and noise of a server are not "
    "known. Sampled replies are not compared: two requests of one seed differ on a server."
)
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference between two replies.

    Attributes:
        unit: what ``index`` counts: ``token`` or ``character``. plain_id, drafted_id: None where no token is named, or
            the reply ended. plain_text, drafted_text: from the first character that differs on, a few.
        margin, over: see ``service.race.Race``. unknown: why there is neither.
    """

    unit: str
    index: int
    plain_id: int | None
    drafted_id: int | None
    plain_text: str
    drafted_text: str
    margin: float | None
    over: float | None
    unknown: str

    @property
    def line(self) -> str:
        """Where, both sides, and how near they were."""
        margin = f"margin unknown: {self.unknown}"
        if self.margin is not None or self.over is not None:
            margin = f"margin {self.margin:.3g}" if self.margin is not None else f"margin over {self.over:.3g}"
        sides = ((self.plain_id, self.plain_text), (self.drafted_id, self.drafted_text))
        plain, drafted = (_side(token, text) for token, text in sides)
        return f"{self.unit} {self.index} is {plain} without, {drafted} with drafting; {margin}"


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt both ways. ``tokens`` of the drafted reply; ``prompt`` is its index from 0."""

    prompt: int
    verdict: Verdict
    compared: str
    tokens: int
    mean_acceptance_length: float | None
    block_size: int
    difference: Parting | None
    case: str = "greedy"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked. ``tokens``: of a reply at most."""

    prompts: Sequence[Prompt]
    tokens: int
    thinking: bool


class Comparison:
    """Every prompt plain and drafted; ``cancel`` may be called from any thread.

    Attributes:
        notices: what the servers gave cause to say, each once.
    """

    def __init__(self, service: Loaded, plan: Plan) -> None:
        self.notices: list[str] = []
        self._service, self._plan = service, plan
        self._racer: Racer | None = None
        self._cancelled = False

    def run(self, progress: Progress = lambda _text, _fraction: None) -> tuple[Run, ...]:
        """Compare all.

        Raises:
            Interrupted: it was cancelled. DFlashError: a request failed.
        """
        racers = [Racer(self._service, self._request(prompt), ORDER_OF_REPLIES) for prompt in self._plan.prompts]
        replies = [(mode, number) for mode in ORDER_OF_REPLIES for number in range(len(racers))]
        for done, (mode, number) in enumerate(replies):
            what = "with drafting" if mode == "dflash" else "without"
            progress(f"certifying {what}, prompt {number + 1} of {len(racers)}", done / len(replies))
            self._begin(racers[number])
            racers[number].reply(mode, self._gather)
        runs = []
        for number, racer in enumerate(racers):
            self._begin(racer)
            runs.append(_run(number, racer.outcome()))
        return tuple(runs)

    def _begin(self, racer: Racer) -> None:
        self._racer = racer
        if self._cancelled:
            raise Interrupted("interrupted")

    def cancel(self) -> None:
        """End it early."""
        self._cancelled = True
        if self._racer is not None:
            self._racer.cancel()

    def _request(self, prompt: Prompt) -> Request:
        limits = Limits(self._plan.tokens)
        if prompt.ids:
            return Request(prompt_ids=prompt.ids, limits=limits)
        return user_request(prompt.text, limits=limits, thinking=self._plan.thinking)

    def _gather(self, _mode: Mode, event: Event) -> None:
        if isinstance(event, Notice) and event.message not in self.notices:
            self.notices.append(event.message)


def _run(number: int, race: Race) -> Run:
    verdict: Verdict = "equal"
    if race.first_difference is not None:
        known = race.margin is not None or race.over is not None
        verdict = "wide" if race.wide else "near-tie" if known else "unknown"
    stats = race.dflash.finished.stats
    compared = "texts" if race.by_text else "token ids"
    difference = None if race.first_difference is None else _parting(race, race.first_difference)
    return Run(
        number, verdict, compared, race.dflash.tokens, stats.mean_acceptance_length, stats.block_size, difference
    )


def _parting(race: Race, index: int) -> Parting:
    ids = [lane.token_ids[index] if index < len(lane.token_ids) else None for lane in (race.ar, race.dflash)]
    if race.by_text:
        ids = [None, None]
    texts = [lane.whole_text for lane in (race.ar, race.dflash)]
    at = len(os.path.commonprefix(texts))
    plain, drafted = (text[at : at + SHOWN] for text in texts)
    return Parting(race.unit, index, ids[0], ids[1], plain, drafted, race.margin, race.over, race.unknown)


def _side(token: int | None, text: str) -> str:
    return " ".join(filter(None, ("" if token is None else str(token), repr(text) if text else ""))) or "the end"


def verdict_of(runs: Sequence[Run]) -> Verdict:
    """The worst of all runs."""
    return max((run.verdict for run in runs), key=ORDER.index, default="equal")


def statement(runs: Sequence[Run]) -> str:
    """What was found, in one line, in words that claim no more."""
    equal = sum(run.verdict == "equal" for run in runs)
    how = (
        "token by token" if all(run.compared == "token ids" for run in runs) else "as texts: the server names no tokens"
    )
    same = f"{equal} of {len(runs)} greedy replies equal, {how}"
    parted = [run for run in runs if run.difference is not None]
    if not parted:
        return same
    counts = {each: sum(run.verdict == each for run in parted) for each in ORDER}
    ties = [run.difference for run in parted if run.difference and run.verdict == "near-tie"]
    margins = [each.margin or each.over or 0.0 for each in ties]
    near = f"within {NEAR_TIE:g}, largest margin {max(margins):.3g}" if margins else ""
    words = [
        f"{_count(counts['near-tie'], 'near-tie')} by log probability ({near})" if counts["near-tie"] else "",
        f"{counts['wide']} wider than any near-tie (over {NEAR_TIE:g})" if counts["wide"] else "",
        f"{counts['unknown']} of unknown margin, so not judged" if counts["unknown"] else "",
    ]
    return f"{same}; {_count(len(parted), 'first difference')}: {', '.join(filter(None, words))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def failure(runs: Sequence[Run]) -> DFlashError | None:
    """The error that it ends with: a difference is no near-tie (exit code 7), or nobody can judge one (exit code 1)."""
    verdict = verdict_of(runs)
    worst = next((run for run in runs if run.verdict == verdict), None)
    if worst is None or worst.difference is None or verdict == "near-tie":
        return None
    where = f"prompt {worst.prompt + 1}: {worst.difference.line}"
    if verdict == "wide":
        return ExactnessError(
            f"{where}, more than {NEAR_TIE:g} by the plain server's log probabilities",
            "the drafting server does not write the target's own text, or the two were started unlike each other",
        )
    return DFlashError(
        f"{where}: the texts differ, and whether by a near-tie is not known",
        "a plain vLLM tells it by its log probabilities; SGLang does not",
    )


def report(
    pair: Pair,
    servers: tuple[ServerFacts, ServerFacts],
    plan: Plan,
    comparison: Comparison,
    runs: Sequence[Run],
) -> dict[str, Any]:
    """What is handed in: no address and no folder of any machine, so that it can be published.

    Args:
        servers: the drafting one and the plain one.
    """
    fault = failure(runs)
    drafting, plain = servers
    return {
        "report": "dflash certify --url",
        "schema": SCHEMA,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "pair": pair.name if pair.bundled else os.path.basename(pair.name) if is_on_disk(pair.name) else pair.name,
        "note": TOY if pair.toy else None,
        "versions": {"python": platform.python_version(), "dflash-local": __version__},
        "servers": {"drafting": identity(drafting), "plain": identity(plain)},
        "verdict": verdict_of(runs),
        "statement": statement(runs),
        "promise": PROMISE,
        "failure": fault.message if fault is not None else None,
        "near_tie": NEAR_TIE,
        "sampling": "greedy",
        "thinking": plan.thinking,
        "max_new_tokens": plan.tokens,
        "prompts": [{"kind": prompt.kind, "text": prompt.text, "ids": list(prompt.ids)} for prompt in plan.prompts],
        "runs": [asdict(run) for run in runs],
        "notices": [_without_address(notice, servers) for notice in comparison.notices],
    }


def identity(facts: ServerFacts) -> dict[str, Any]:
    """A server as reports name it; null for what it does not report."""
    return {
        "program": facts.program,
        "version": facts.version or None,
        "model": facts.served,
        "context": facts.context or None,
        "drafts": facts.drafts,
        "drafts_a_cycle": facts.block_size - 1 if facts.block_size else None,
        "drafter": facts.drafter,
        "method": facts.method or None,
        "notices": [_without_address(notice, (facts,)) for notice in facts.notices],
    }


def _without_address(notice: str, servers: Sequence[ServerFacts]) -> str:
    for facts in servers:
        notice = notice.replace(f" at {facts.url}", "").replace(facts.url, "it")
    return notice


def lines(pair: Pair, servers: tuple[ServerFacts, ServerFacts], runs: Sequence[Run], width: int) -> list[str]:
    """The certificate as a short table and what it means."""
    columns = [tables.Column(title, title != TITLES[-1]) for title in TITLES]
    rows = [
        (
            str(run.prompt + 1),
            str(run.tokens),
            "-" if run.mean_acceptance_length is None else f"{run.mean_acceptance_length:.2f}",
            run.verdict if run.difference is None else f"{run.verdict}: {run.difference.line}",
        )
        for run in runs
    ]
    return [
        f"{pair.label}: {servers[0].loaded_as}; plain: {servers[1].loaded_as}; greedy",
        "",
        *tables.table(columns, rows, width),
        "",
        f"verdict: {statement(runs)}",
        *([f"({TOY})"] if pair.toy else []),
    ]
