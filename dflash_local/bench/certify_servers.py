"""What can be known of the text of a drafting server: greedy replies beside those of a server that does not draft.

Nothing behind the replies is seen: not the dtype, not the noise of the machine, not the logits that chose. So the
levels of the certificate of a loaded pair (docs/exactness.md) are not claimed here.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dflash_local.bench.certificate import AGAIN, ORDER, Divergence, Run, Verdict, runs_table, worst
from dflash_local.bench.prompts import Prompt
from dflash_local.bench.report import TOY, Found, Progress, finite, opening
from dflash_local.catalog.bundled import Pair
from dflash_local.checkpoint_files.source import is_on_disk
from dflash_local.errors import DFlashError, ExactnessError, Interrupted
from dflash_local.events import Event, Mode, Notice
from dflash_local.request import Limits, Request, user_request
from dflash_local.service.race import NEAR_TIE, Lane, Race, Racer
from dflash_local.service.service import Service
from dflash_local.tables import counted

if TYPE_CHECKING:
    from dflash_local.bench.next_tokens import SampledFinding
    from dflash_local.remote.abilities import Abilities
    from dflash_local.remote.server_checks import ServerFacts

SHOWN = 24  # characters of each text from the first difference on
PREFIX = 120  # of what both have before it
BEHIND = 16  # tokens behind a difference that a repeated reply may have: drafts are cut by the limit
STRENGTHS = ("text only", "token by token", "token by token with margins")
ORDER_OF_REPLIES: tuple[Mode, Mode] = ("dflash", "ar")  # the plain server is asked for margins in the end
PROMISE = (
    "Greedy replies of two servers were compared, token by token where they name tokens, else as texts. A first "
    f"difference is judged by the plain server's log probabilities alone: over {NEAR_TIE:g} it is wider than any "
    "near-tie; within that it is as near-ties are, which is no proof of one, since dtype and noise of a server are not "
    "known. Where they differ, both servers are asked again: one that does not repeat itself is told apart. Sampled "
    "replies (--samples) are counted and held against the plain server's probabilities, never against each other."
)


class ServerComparison:
    """Every prompt plain and drafted; ``cancel`` may be called from any thread.

    Attributes:
        notices: what the servers gave cause to say, each once.
    """

    def __init__(
        self,
        service: Service,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        thinking: bool,
        repeats: bool = True,
    ) -> None:
        """Take what is to be asked.

        Args:
            repeats: ask again where replies differ; False where only one of the servers runs at a time.
        """
        self.prompts, self.max_new_tokens, self.thinking = prompts, max_new_tokens, thinking
        self._repeats = repeats
        self.notices: list[str] = []
        self._service = service
        self._racer: Racer | None = None
        self._cancelled = False

    def run(self, progress: Progress) -> tuple[Run, ...]:
        """Compare all.

        Raises:
            Interrupted: it was cancelled. DFlashError: a request failed.
        """
        racers = [Racer(self._service, request, ORDER_OF_REPLIES) for request in self.requests]
        replies = [(mode, number) for mode in ORDER_OF_REPLIES for number in range(len(racers))]
        for done, (mode, number) in enumerate(replies):
            what = "with drafting" if mode == "dflash" else "without"
            progress(f"certifying {what}, prompt {number + 1} of {len(racers)}", done / len(replies))
            self._begin(racers[number])
            racers[number].reply(mode, self._gather)
        runs = []
        for number, racer in enumerate(racers):
            self._begin(racer)
            race = racer.outcome()
            at = race.first_difference
            repeated = None if at is None or not self._repeats else self._repeated(racer, race, at)
            runs.append(_run(number, race, repeated))
        return tuple(runs)

    def _repeated(self, racer: Racer, race: Race, at: int) -> tuple[int, int]:
        """How often the plain server, and the drafting one, write the same again up to the difference."""
        tokens = self.max_new_tokens if race.by_text else at + 1 + BEHIND

        def same(lane: Lane) -> int:
            again = [racer.again(lane.mode, tokens) for _ in range(AGAIN)]
            return sum(_up_to(race, one, at) == _up_to(race, lane, at) for one in again)

        return same(race.ar), same(race.dflash)

    @property
    def cancelled(self) -> bool:
        """True once it was ended early."""
        return self._cancelled

    @property
    def requests(self) -> list[Request]:
        """What is asked, greedily."""
        return [self._request(prompt) for prompt in self.prompts]

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
        limits = Limits(self.max_new_tokens)
        if prompt.ids:
            return Request(prompt_ids=prompt.ids, limits=limits)
        return user_request(prompt.text, limits=limits, thinking=self.thinking)

    def _gather(self, _mode: Mode, event: Event) -> None:
        if isinstance(event, Notice) and event.message not in self.notices:
            self.notices.append(event.message)


def _up_to(race: Race, lane: Lane, at: int) -> str | tuple[int, ...]:
    return lane.whole_text[: at + 1] if race.by_text else lane.token_ids[: at + 1]


def _run(number: int, race: Race, repeated: tuple[int, int] | None) -> Run:
    verdict: Verdict = "identical" if race.dflash.token_ids or race.dflash.whole_text else "empty"
    difference: Divergence | None = None
    if race.first_difference is not None:
        known = race.margin is not None or race.over is not None
        verdict = "wide" if race.wide else "near-tie" if known else "unknown"
        difference = _divergence(race, race.first_difference, repeated)
        if verdict != "near-tie" and not difference.steady:
            verdict = "unsteady"
    stats = race.dflash.finished.stats
    compared = "texts" if race.by_text else "token ids"
    length, block = stats.mean_acceptance_length, stats.block_size
    return Run(number, "greedy", block, verdict, race.dflash.tokens, length, difference, compared=compared)


def _divergence(race: Race, index: int, repeated: tuple[int, int] | None) -> Divergence:
    lanes = (race.ar, race.dflash)
    ids = [lane.token_ids[index] if not race.by_text and index < len(lane.token_ids) else None for lane in lanes]
    texts = [lane.whole_text for lane in lanes]
    at = len(os.path.commonprefix(texts))
    return Divergence(
        index=index,
        ar_id=ids[0],
        dflash_id=ids[1],
        ar_text=texts[0][at : at + SHOWN],
        dflash_text=texts[1][at : at + SHOWN],
        margin=race.margin,
        over=race.over,
        unknown=race.unknown,
        threshold=NEAR_TIE,
        unit=race.unit,
        prefix=texts[0][max(0, at - PREFIX) : at],
        repeated=repeated,
    )


def statement(runs: Sequence[Run]) -> str:
    """Say what was found, in one line, in words that claim no more."""
    untried = all(run.mean_acceptance_length == 1.0 for run in runs)
    return _outcome(runs) + "; the server accepted no draft, so nothing is known of its drafting" * untried


def _outcome(runs: Sequence[Run]) -> str:
    equal = sum(run.verdict == "identical" for run in runs)
    by_ids = all(run.compared == "token ids" for run in runs)
    how = "token by token" if by_ids else "as texts: the server names no tokens"
    same = f"{equal} of {len(runs)} greedy replies equal, {how}"
    empty = sum(run.verdict == "empty" for run in runs)
    same += f"; {empty} without a text on either side, so not compared" if empty else ""
    parted = [run for run in runs if run.divergence is not None]
    if not parted:
        return same
    counts = {each: sum(run.verdict == each for run in parted) for each in ORDER}
    ties = [run.divergence for run in parted if run.divergence and run.verdict == "near-tie"]
    margins = [each.margin or each.over or 0.0 for each in ties]
    near = f"within {NEAR_TIE:g}, largest margin {max(margins):.3g}" if margins else ""
    words = [
        f"{counted(counts['near-tie'], 'near-tie')} by log probability ({near})" if counts["near-tie"] else "",
        f"{counts['wide']} wider than any near-tie (over {NEAR_TIE:g})" if counts["wide"] else "",
        f"{counts['unsteady']} where a server does not repeat itself" if counts["unsteady"] else "",
        f"{counts['unknown']} of unknown margin, so not judged" if counts["unknown"] else "",
    ]
    return f"{same}; {counted(len(parted), 'first difference')}: {', '.join(filter(None, words))}"


def strength(runs: Sequence[Run], plain: Abilities | None) -> str:
    """Return how strong the verdict is, by what the servers' replies hold."""
    if any(run.compared != "token ids" for run in runs):
        return STRENGTHS[0]
    return STRENGTHS[2 if plain is None or plain.logprobs else 1]


def failure(runs: Sequence[Run], sampled: SampledFinding | None = None) -> DFlashError | None:
    """Return the error that it ends with: a difference is no near-tie, or nobody can judge one."""
    found = _greedy_failure(runs)
    if sampled is None or not sampled.wrong or isinstance(found, ExactnessError):
        return found
    if sampled.at_plain:
        return DFlashError(f"sampled replies cannot be judged: {sampled.name}", "see how the plain server was started")
    return ExactnessError(
        f"sampled replies: {sampled.name}",
        "the drafting server does not sample as the target would, or the two were started unlike each other",
    )


def _greedy_failure(runs: Sequence[Run]) -> DFlashError | None:
    verdict = worst(runs)
    found = next((run for run in runs if run.verdict == verdict), None)
    if found is not None and verdict == "empty":
        what = f"prompt {found.prompt + 1}: neither reply has a text, so nothing was compared"
        return DFlashError(what, "give another --prompt, or more --max-new-tokens")
    if found is None or found.divergence is None or verdict == "near-tie":
        return None
    where = f"prompt {found.prompt + 1}: {found.divergence.line}"
    if verdict == "wide":
        return ExactnessError(
            f"{where}, more than {NEAR_TIE:g} by the plain server's log probabilities",
            "the drafting server does not write the target's own text, or the two were started unlike each other",
        )
    if verdict == "unsteady":
        return _unsteady(where, found.divergence)
    return DFlashError(
        f"{where}: the texts differ, and whether by a near-tie is not known",
        "a plain vLLM or llama.cpp tells it by its log probabilities; others do not",
    )


def _unsteady(where: str, divergence: Divergence) -> DFlashError:
    assert divergence.repeated is not None  # that is how it was found
    plain, drafting = divergence.repeated
    if plain < AGAIN:
        return DFlashError(
            f"{where}: the plain server does not repeat itself ({plain} of {AGAIN}), so that nothing is judged by it",
            "other requests of a batch, or a cache, may change its rounding: ask it alone",
        )
    return ExactnessError(
        f"{where}: the drafting server does not repeat itself ({drafting} of {AGAIN}), and the plain one does",
        "state of an earlier request, or of rejected drafts, may reach its replies",
    )


def presented(
    pair: Pair,
    servers: tuple[ServerFacts, ServerFacts],
    compared: ServerComparison,
    runs: Sequence[Run],
    abilities: tuple[Abilities, Abilities] | None = None,
    sampled: SampledFinding | None = None,
) -> Found:
    """Return what is handed in, without an address or a folder of any machine, and its lines.

    Args:
        servers: the drafting one and the plain one. abilities: of both, where they were asked.
    """
    fault, (drafting, plain) = failure(runs, sampled), servers
    drafting_gives, plain_gives = abilities or (None, None)
    strong = strength(runs, plain_gives)
    report = {
        **opening(
            "dflash certify --url", os.path.basename(pair.name) if is_on_disk(pair.name) else pair.name, pair.toy
        ),
        "servers": {"drafting": identity(drafting, drafting_gives), "plain": identity(plain, plain_gives)},
        "verdict": worst(runs),
        "strength": strong,
        "statement": statement(runs),
        "promise": PROMISE,
        "failure": fault.message if fault is not None else None,
        "near_tie": NEAR_TIE,
        "sampling": "greedy" if sampled is None else "greedy and sampled",
        "sampled": None if sampled is None else {**asdict(sampled), "line": sampled.line},
        "thinking": compared.thinking,
        "max_new_tokens": compared.max_new_tokens,
        "prompts": [{"kind": prompt.kind, "text": prompt.text, "ids": list(prompt.ids)} for prompt in compared.prompts],
        "runs": [asdict(run) for run in runs],
        "notices": [_without_address(notice, servers) for notice in compared.notices],
    }
    lines = [f"{pair.label}: {drafting.loaded_as}; plain: {plain.loaded_as}; greedy", "", *runs_table(runs), ""]
    lines += [f"verdict: {statement(runs)}", f"strength: {strong}", *([] if sampled is None else [sampled.line])]
    return finite(report), [*lines, *([f"({TOY})"] if pair.toy else [])]


def identity(facts: ServerFacts, gives: Abilities | None = None) -> dict[str, Any]:
    """Return a server as reports name it, without its address; null for what it does not report."""
    return {
        "program": facts.program,
        "version": facts.version or None,
        "model": facts.served,
        "context": facts.context or None,
        "drafts": facts.drafts,
        "block_size": facts.block_size or None,
        "drafter": facts.drafter,
        "method": facts.method or None,
        "gives": None if gives is None else asdict(gives),
        "notices": [_without_address(notice, (facts,)) for notice in facts.notices],
    }


def _without_address(notice: str, servers: Sequence[ServerFacts]) -> str:
    for facts in servers:
        notice = notice.replace(f" at {facts.url}", "").replace(facts.url, "it")
    return notice
