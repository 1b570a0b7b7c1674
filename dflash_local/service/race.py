"""One prompt with and without drafting, one after the other on one loaded pair, and what came of both.

Every figure comes from the events of the two replies; nothing is timed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dflash_local.errors import Interrupted, UsageError
from dflash_local.events import Event, Finished, Mode, Stats, Step, TokenLogprob
from dflash_local.request import MAX_TOP_LOGPROBS, Request, fresh_seed
from dflash_local.service.ticket import Ticket

if TYPE_CHECKING:
    from dflash_local.service.service import Service

WARM_UP_TOKENS = 16
MODES: tuple[Mode, Mode] = ("ar", "dflash")
NAMES: dict[Mode, str] = {"ar": "plain", "dflash": "drafted"}  # as people read them
NEAR_TIE = 0.5  # a larger margin counts as no near-tie anywhere (docs/exactness.md)


@dataclass(frozen=True, slots=True)
class Lane:
    """One of the two replies: its steps as they came, and its end."""

    mode: Mode
    steps: tuple[Step, ...]
    finished: Finished

    @property
    def events(self) -> tuple[Event, ...]:
        """Its steps and its end."""
        return (*self.steps, self.finished)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All that was emitted."""
        return tuple(token for step in self.steps for token in step.token_ids)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of each token, where the server tells them unasked or the request asked for them."""
        return tuple(row for step in self.steps for row in step.logprobs)

    @property
    def tokens(self) -> int:
        """How many, also where a server names none."""
        return len(self.token_ids) or self.finished.usage.completion_tokens

    @property
    def text(self) -> str:
        """The reply, without its thinking."""
        return "".join(piece.text for step in self.steps for piece in step.pieces if piece.channel != "thinking")

    @property
    def whole_text(self) -> str:
        """The reply, its thinking included."""
        return "".join(piece.text for step in self.steps for piece in step.pieces)

    @property
    def seconds(self) -> float:
        """From the start of the request to its last token."""
        return self.finished.stats.prefill_s + self.finished.stats.decode_s

    def as_dict(self) -> dict[str, Any]:
        """Its figures."""
        stats = self.finished.stats
        return {
            "token_ids": list(self.token_ids),
            "seconds": self.seconds,
            "prefill_s": stats.prefill_s,
            "decode_s": stats.decode_s,
            "tokens_per_s": stats.tokens_per_s,
            "end_to_end_tokens_per_s": stats.end_to_end_tokens_per_s,
            "mean_acceptance_length": stats.mean_acceptance_length,
            "turn_acceptance_length": stats.turn_acceptance_length,
            "acceptance_lengths": list(stats.acceptance_lengths),
            "finish_reason": self.finished.reason,
        }


@dataclass(frozen=True, slots=True)
class Race:
    """Both replies to one request.

    Attributes:
        margin: by how much the target preferred its own token at the first difference, in logits (a difference of log
            probabilities is one of logits); None when they are equal or that is not known.
        over: the margin is larger than this, where it is not known.
        in_server: servers of another program wrote both. unknown: of these, why there is no margin.
    """

    seed: int
    ar: Lane
    dflash: Lane
    margin: float | None = None
    over: float | None = None
    in_server: bool = False
    unknown: str = ""

    @property
    def by_text(self) -> bool:
        """True where texts are compared: a server that names no tokens, or not all, wrote one of them."""
        both = (self.ar, self.dflash)
        if not self.in_server or any((lane.tokens or lane.whole_text) and not lane.token_ids for lane in both):
            return self.in_server
        return self.ar.token_ids == self.dflash.token_ids and self.ar.whole_text != self.dflash.whole_text

    @property
    def first_difference(self) -> int | None:
        """Index of the first token (of texts: character) that is not the same; None when all are."""
        both = (self.ar, self.dflash)
        one, two = (lane.whole_text for lane in both) if self.by_text else (lane.token_ids for lane in both)
        if one == two:
            return None
        return next((i for i, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))

    @property
    def speed_up(self) -> float | None:
        """Of the decode rates; None where one is not known, as of one token or of a server that counts none."""
        rates = [lane.finished.stats.tokens_per_s for lane in (self.dflash, self.ar)]
        return rates[0] / rates[1] if all(rates) else None

    @property
    def wall_clock(self) -> float:
        """Of the whole times, the prompt included."""
        return self.ar.seconds / self.dflash.seconds if self.dflash.seconds else 0.0

    @property
    def verdict(self) -> str:
        """Whether the texts are equal, as it is said on every screen."""
        if self.first_difference is None:
            return "identical: yes, as texts: the server names no tokens" if self.by_text else "identical: yes"
        found = f"identical: no; first difference at {self.unit} {self.first_difference}"
        if self.margin is None and self.over is None:
            return f"{found}, margin{f' unknown: {self.unknown}' if self.in_server else ': dflash certify measures it'}"
        margin = f"{self.margin:.3g}" if self.margin is not None else f"over {self.over:.3g}"
        if self.wide:
            return f"{found}, margin {margin}: more than a near-tie{'' if self.in_server else '; run dflash certify'}"
        if self.in_server:
            return f"{found}, margin {margin} by log probability: within {NEAR_TIE:g}, as near-ties are"
        return f"{found}, margin {margin}; dflash certify says whether that is a near-tie"

    @property
    def unit(self) -> str:
        """What ``first_difference`` counts."""
        return "character" if self.by_text else "token"

    @property
    def wide(self) -> bool:
        """True where the first difference is known to be none of a near-tie."""
        return (self.margin or self.over or 0.0) > NEAR_TIE

    @property
    def ratios(self) -> str:
        """Both ratios, as they are said on every screen."""
        decode = "" if self.speed_up is None else f", {self.speed_up:.2f}x decode speed"
        return f"this run: {self.wall_clock:.2f}x wall clock{decode}"

    @property
    def winner(self) -> Mode:
        """The one with the higher decode rate, or where that is not known the shorter time; of equals the drafted."""
        return "dflash" if self._ratio >= 1 else "ar"

    @property
    def _ratio(self) -> float:
        return self.wall_clock if self.speed_up is None else self.speed_up

    @property
    def headline(self) -> tuple[str, str]:
        """What stands in large letters at the end, the ratio that decides, and what stands under it."""
        steps = tokens_a_step(self.dflash.finished.stats)
        a_step = [] if steps is None else [f"{steps:.1f} tokens a step"]
        same = "same text" if self.first_difference is None and not self.by_text else self.verdict
        close = 0.95 <= self._ratio < 1.05  # rounded to one place, a narrow loss would be a tie
        by_clock = ["by wall clock"] if self.speed_up is None else []
        return f"{self._ratio:.{2 if close else 1}f}x", ", ".join([*by_clock, *a_step, same])

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """The figures in columns: their names, of the plain reply, of the drafted one, and the ratio where it tells."""
        plain, drafted = self.ar.finished.stats, self.dflash.finished.stats
        length = drafted.mean_acceptance_length
        rates = [f"{rate:.1f}" if rate else "-" for rate in (plain.tokens_per_s, drafted.tokens_per_s)]
        return [
            ("time", f"{self.ar.seconds:.2f} s", f"{self.dflash.seconds:.2f} s", f"{self.wall_clock:.2f}x"),
            ("tokens", str(self.ar.tokens), str(self.dflash.tokens), ""),
            ("tok/s", rates[0], rates[1], "" if self.speed_up is None else f"{self.speed_up:.2f}x"),
            ("acceptance length", "-", "-" if length is None else f"{length:.2f}", ""),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Both side by side, as ``--json`` prints it."""
        stats = self.dflash.finished.stats
        return {
            "seed": self.seed,
            "text": self.dflash.text,
            "identical": self.first_difference is None,
            "first_difference": self.first_difference,
            "compared": "texts" if self.by_text else "token ids",
            "margin": self.margin,
            "margin_over": self.over,
            "decode_ratio": self.speed_up,
            "wall_clock_ratio": self.wall_clock,
            "engine": stats.engine,
            "block_size": stats.block_size,
            "ar": self.ar.as_dict(),
            "dflash": self.dflash.as_dict(),
        }


class Racer:
    """Runs a race; ``cancel`` may be called from any thread.

    Attributes:
        order: of the two replies.
    """

    def __init__(self, service: Service, request: Request, order: tuple[Mode, Mode] = MODES) -> None:
        """Take the pair and the request; UsageError where it was loaded without its drafter."""
        if service.facts is not None and not service.facts.drafting:
            raise UsageError("a race needs a drafter, and none was loaded", "name one with --drafter")
        seed = request.sampling.seed
        self.seed = fresh_seed() >> 1 if seed is None else seed  # servers take signed numbers of 64 bits
        self.order = order
        self._service = service
        self._request = replace(request, sampling=replace(request.sampling, seed=self.seed))
        facts = service.facts
        if facts is not None and facts.in_server and facts.names_tokens:
            self._request = replace(self._request, return_token_ids=True)
        self._lanes: dict[Mode, Lane] = {}
        self._ticket: Ticket | None = None
        self._cancelled = False

    def run(self, on_event: Callable[[Mode, Event], None] = lambda _mode, _event: None, warm_up: bool = True) -> Race:
        """Both replies, each alone on the machine; Interrupted where it was cancelled.

        Args:
            warm_up: False where only the texts matter.
        """
        short = replace(self._request.limits, max_new_tokens=min(WARM_UP_TOKENS, self._request.limits.max_new_tokens))
        for mode in self.order:
            if warm_up:  # what is paid once (first kernels, memory) is charged to neither
                self._lane(replace(self._request, mode=mode, limits=short), lambda _mode, _event: None)
            self.reply(mode, on_event)
        return self.outcome()

    def reply(self, mode: Mode, on_event: Callable[[Mode, Event], None]) -> None:
        """One of the two replies; see ``run``."""
        self._lanes[mode] = self._lane(replace(self._request, mode=mode), on_event)

    def again(self, mode: Mode, tokens: int) -> Lane:
        """One of the two replies once more, as far as so many tokens; the race keeps the first one."""
        limits = replace(self._request.limits, max_new_tokens=min(tokens, self._request.limits.max_new_tokens))
        return self._lane(replace(self._request, mode=mode, limits=limits), lambda _mode, _event: None)

    def outcome(self) -> Race:
        """What came of both replies; where they differ, the target is asked once more. Interrupted: cancelled."""
        race = Race(self.seed, self._lanes["ar"], self._lanes["dflash"])
        facts = self._service.facts
        return self._in_servers(race) if facts is not None and facts.in_server else self._with_margin(race)

    def cancel(self) -> None:
        """End it early."""
        self._cancelled = True
        if self._ticket is not None:
            self._ticket.cancel()

    def _in_servers(self, race: Race) -> Race:
        """A race of two servers, with its margin or the reason why there is none.

        Raises:
            UsageError: they do not read the prompt alike.
        """
        race = replace(race, in_server=True)
        counts = [lane.finished.usage.prompt_tokens for lane in (race.ar, race.dflash)]
        if all(counts) and counts[0] != counts[1]:
            raise UsageError(
                f"the plain server reads the prompt as {counts[0]} tokens, the drafting one as {counts[1]}",
                "start both with the same model and chat template",
            )
        if race.first_difference is None:
            return race
        if not self._request.sampling.greedy:
            return replace(race, unknown="two sampled requests of one seed differ on a server")
        if race.by_text:
            return replace(race, unknown="the server names no tokens")
        try:
            found = self._with_margin(race)
        except UsageError as error:
            return replace(race, unknown=error.message)
        known = found.margin is not None or found.over is not None
        return found if known else replace(found, unknown=found.unknown or "the server's figures do not tell it")

    def _with_margin(self, race: Race) -> Race:
        """The race with the margin of its first difference, where the target's own figures tell it.

        They are taken before temperature and penalties: with either, the scores that decided are others.
        """
        at, sampling = race.first_difference, self._request.sampling
        if at is None or not sampling.greedy or sampling.penalised:
            return race
        if at >= min(len(race.ar.token_ids), len(race.dflash.token_ids)):
            return replace(race, unknown="one of them only ended earlier")
        lane = race.ar
        rows = lane.logprobs
        if len(rows) <= at or not rows[at].top:
            limits = replace(self._request.limits, max_new_tokens=at + 1)
            again = replace(self._request, mode="ar", limits=limits, logprobs=MAX_TOP_LOGPROBS)
            lane = self._lane(again, lambda _mode, _event: None)
            rows = lane.logprobs
        if lane.token_ids[: at + 1] != race.ar.token_ids[: at + 1] or len(rows) <= at or not rows[at].top:
            return replace(race, unknown="asked once more, the target wrote another text")
        known = {token: value for token, _, value, _ in rows[at].top}
        if rows[at].token_id != race.ar.token_ids[at] or rows[at].logprob < max(known.values()):
            return replace(race, unknown="other scores than these log probabilities decided")  # a server's penalties
        drafted = known.get(race.dflash.token_ids[at])
        if drafted is None:
            over = rows[at].logprob - min(known.values())
            if over > NEAR_TIE:
                return replace(race, over=over)
            return replace(race, unknown="the drafted token is none of those whose probability is told")
        return replace(race, margin=rows[at].logprob - drafted)

    def _lane(self, request: Request, on_event: Callable[[Mode, Event], None]) -> Lane:
        self._ticket = ticket = self._service.submit(request)
        if self._cancelled:
            ticket.cancel()
        steps: list[Step] = []
        finished: Finished | None = None
        for event in ticket:
            on_event(request.mode, event)
            if isinstance(event, Step):
                steps.append(event)
            elif isinstance(event, Finished):
                finished = event
        if finished is None or finished.reason == "cancelled":
            raise Interrupted("the race was stopped")
        return Lane(request.mode, tuple(steps), finished)


def tokens_a_step(stats: Stats) -> float | None:
    """Mean over all cycles, those that drafted nothing included; None where nothing was drafted."""
    drafted = len(stats.acceptance_lengths)
    if not drafted:  # a server tells the mean alone
        return stats.mean_acceptance_length
    return (sum(stats.acceptance_lengths) + stats.undrafted_cycles) / (drafted + stats.undrafted_cycles)
