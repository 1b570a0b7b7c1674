"""One request from prompt to ``Finished``: the one loop of the project, drafted and plain alike.

Turns the runner's cycles into events: stop ids and strings, limits, cancel, text, figures.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dflash_local.chat.channels import channel_parser
from dflash_local.chat.template import Rendered
from dflash_local.chat.text_stream import TextStream
from dflash_local.engine.drafter_choice import DrafterChoice
from dflash_local.engine.grammar import Grammar
from dflash_local.engine.held_sequences import HeldSequence, hosted
from dflash_local.engine.reply_figures import ALARM_CYCLES, ReplyFigures, likely_causes
from dflash_local.engine.runner import Cycle, Snapshot
from dflash_local.engine.sampling import Likelihood, Sampler
from dflash_local.engine.scheduler import Scheduler
from dflash_local.engine.text_kind import TextKind
from dflash_local.events import (
    Bytes,
    Event,
    Finished,
    FinishReason,
    Notice,
    Origin,
    Piece,
    PrefillProgress,
    Started,
    Stats,
    Step,
    TokenLogprob,
    Usage,
)
from dflash_local.request import Request, fresh_seed

if TYPE_CHECKING:
    from dflash_local.engine.session import Session

HOPELESS_CYCLES = 32  # this many cycles in a row without one accepted draft: stop drafting


@dataclass(frozen=True, slots=True)
class SetAside:
    """Hold a reply's sequence while another one has the device.

    Attributes:
        rest: ids behind the committed ones. turn: see ``Session``. at: seconds of the clock.
    """

    sequence: HeldSequence
    rest: list[int]
    turn: int
    at: float


class GenerationLoop:
    """The state of one reply. Use ``events()`` once.

    Attributes:
        stats: its figures, once it has ended. said: its ids so far.
        reason: why it ends; None before. aside: see ``set_aside``; None while its sequence is on the device.
    """

    stats: Stats

    def __init__(
        self,
        session: Session,
        request: Request,
        rendered: Rendered,
        cancelled: Callable[[], bool],
        grammar: Grammar | None = None,
    ) -> None:
        self.session, self.runner, self.request, self.rendered = session, session.runner, request, rendered
        self.cancelled, self.guides = cancelled, () if grammar is None else (grammar,)
        self.drafting = request.mode == "dflash"
        self.block = (request.block_size or session.facts.block_size) if self.drafting else 1
        self.seed = request.sampling.seed if request.sampling.seed is not None else fresh_seed()
        room = session.facts.context - len(rendered.ids)
        self.limit = min(request.limits.max_new_tokens, room)
        self.said: list[int] = []
        self.reason: FinishReason | None = None
        self.aside: SetAside | None = None
        self._known = deque[Cycle]()  # cycles that no ``Step`` has told yet
        # Text stands before the next token: of the prompt, or one whose likelihood was reported.
        self.shown = goes_on = request.continues or not request.messages
        self.kind = TextKind("thinking" if rendered.opens_thinking else "final")
        self.scheduler = self._scheduler() if self.drafting else None
        self.drafts = self.choice is None or self.choice.drafts  # as last announced
        self.announced: set[bool] = set()
        trained = session.facts.block_size
        plain = session.plain_step(request)
        self.figures = ReplyFigures(session.runner.name, request.mode, self.block, self.seed, trained, plain)
        self.stream: TextStream | None = None
        if session.tokenizer is not None:
            opens, continues = rendered.opens_thinking, request.continues
            channels = channel_parser(session.tokenizer, opens_thinking=opens, continues=continues)
            self.stream = TextStream(session.tokenizer, request.limits.stop, channels, goes_on)

    @property
    def choice(self) -> DrafterChoice | None:
        """Return what chooses among drafters and verify lengths, where something does."""
        return None if self.scheduler is None else self.scheduler.choice

    def _scheduler(self) -> Scheduler:
        """Return what chooses the cycles: what was learnt goes on, unless the request names the block size or the costs
        are unknown.
        """
        session, runner = self.session, self.runner
        if self.request.block_size is not None or not Scheduler.adapts(runner, self.block):
            return Scheduler(runner, self.block, session.conversations.index, fixed=True)
        known = session.guided_schedulers if self.guides else session.schedulers
        greedy = self.request.sampling.greedy
        if greedy not in known:
            known[greedy] = Scheduler(runner, self.block, session.conversations.index)
            known[greedy].recall(session.confidences.read(greedy))
        known[greedy].begin(self.kind.name)
        return known[greedy]

    @torch.inference_mode()
    def events(self) -> Iterator[Event]:
        """Return PrefillProgress*, Started, (Step | Notice)*, Finished."""
        prompt = self.rendered.ids
        prompt_ids = prompt if self.request.return_token_ids else ()
        if self.limit == 0:
            self.reason = "length"
            yield Started(len(prompt), 0, 0.0, prompt_ids)
            yield self._finish(self.reason)
            return
        reused = self.session.conversations.reuse(self.rendered, self.drafting)
        ids = torch.tensor(prompt, dtype=torch.long, device=self.runner.device)
        self._sampler = Sampler(self.request.sampling, self.seed, self.runner.vocab_size, ids, self.guides)
        self._begin()
        first: Cycle | None = None
        for step in self.runner.prefill(prompt, self.rendered.stable):
            self.session.conversations.remember(step.point)
            yield PrefillProgress(step.done, step.total)
            if self._is_stopped():
                first = None
                break
            first = step.first
        self.figures.prefilled()
        yield Started(len(prompt), reused, self.figures.prefill_s, prompt_ids)
        if first is None:
            yield self._finish("cancelled")
            return
        yield self._step(first)
        while self.reason is None:
            if self._is_stopped():
                self.reason = "cancelled"
                break
            if self.scheduler is None:
                self.runner.launch()
            else:
                self.scheduler.launch()
            self._collect()
            while self._known and self.reason is None:
                yield self._step(self._known.popleft())
            yield from self._watch()
        if self.aside is None:
            self.runner.rewind(len(prompt) + len(self.said))
        if self.stream is not None and (held_back := self.stream.finish()):  # for a stop string or a split character
            yield Step(held_back, (), 0, 0, 0, self.figures.elapsed())
        yield self._finish(self.reason)

    def _begin(self) -> None:
        """Tell the runner how this reply is drafted and sampled, and where it ends."""
        runner = self.runner
        runner.begin(self._sampler, self.session.stop_ids, self.block, self.drafting, self.request.logprobs)
        runner.end_at(len(self.rendered.ids) + self.limit, exactly=bool(self.request.limits.stop))

    def _is_stopped(self) -> bool:
        """Return whether the reply ends here: without its sequence it cannot go on."""
        return self.aside is not None or self.cancelled()

    def _collect(self) -> None:
        """Take the cycles that have become known, and learn from them."""
        for cycle in self.runner.collect():
            self.figures.add(cycle)
            if self.scheduler is not None:
                self.scheduler.add(cycle)
            self._known.append(cycle)

    def set_aside(self, points: list[Snapshot], turn: int, most_bytes: int) -> bool:
        """Copy all that the device holds of this reply to host memory, where ``events()`` stands; nothing is under way
        then. False: it takes more bytes, the engine cannot, or the reply is at its end.
        """
        if self.reason is not None:
            return False
        at, runner = time.perf_counter(), self.runner
        runner.settle()
        self._collect()
        state = runner.hold(most_bytes)
        if state is None:
            return False
        done = len(runner.committed)
        sequence = HeldSequence(list(runner.committed), state, hosted(tuple(points)))
        if sequence.nbytes > most_bytes:
            return False
        self.aside = SetAside(sequence, list(runner.ids[done:]), turn, at)
        return True

    def bring_back(self) -> None:
        """Go on on the device as if nothing had been between; its time does not count."""
        aside = self.aside
        assert aside is not None
        self.aside = None
        self.runner.put(aside.sequence.ids, aside.sequence.state, aside.rest)
        self._begin()
        if self.scheduler is not None:
            self.scheduler.begin(self.kind.name)
            if self.block == 1:
                self.scheduler.stop_drafting()
        self.figures.leave_out(time.perf_counter() - aside.at)

    def _step(self, cycle: Cycle) -> Step:
        """Return a cycle's tokens as a ``Step``; ``reason`` tells whether the reply ends with it."""
        ids = cycle.ids[: self.limit - len(self.said)]
        if ids[-1] in self.session.stop_ids:
            self.reason = "stop"
        elif len(self.said) + len(ids) == self.limit:
            self.reason = "length"
        pieces: tuple[Piece, ...] = ()
        if self.stream is not None:
            origins: list[Origin] = ["accepted" if i < cycle.accepted else "bonus" for i in range(len(ids))]
            shown = ids[:-1] if self.reason == "stop" else ids  # a stop id has no text
            pushed = self.stream.push(shown, origins[: len(shown)])
            pieces = pushed.pieces
            if self.scheduler is not None:
                for piece in pieces:
                    self.kind.add(piece)
                self.scheduler.enter(self.kind.name)
            if pushed.stop_at is not None:
                ids, self.reason = ids[: pushed.stop_at], "stop"
        self.said += ids
        found = tuple(map(self._named, cycle.likelihoods[: len(ids)]))
        counts = cycle.drafted, cycle.accepted, cycle.rows
        sources = {"copied": int(cycle.copied), "mtp": int(cycle.own)}
        return Step(pieces, ids, *counts, self.figures.elapsed(), found, experts=cycle.experts, **sources)

    def _named(self, found: Likelihood) -> TokenLogprob:
        """Return a likelihood with the texts and bytes of its tokens."""
        tokenizer, first = self.session.tokenizer, not self.shown

        def named(token: int) -> tuple[str, Bytes]:
            text, data = ("", None) if tokenizer is None else tokenizer.in_reply(token, first)
            return text, None if data is None else tuple(data)

        top = tuple((token, text, value, data) for token, value in found.top for text, data in (named(token),))
        text, data = named(found.token_id)
        self.shown = self.shown or data is not None
        return TokenLogprob(found.token_id, text, found.logprob, top, data)

    def _watch(self) -> Iterator[Event]:
        """Return alarms: a drafter that never hits is switched off, a low acceptance is reported, once each."""
        if found := self.runner.notice():
            yield Notice(found, "warning")
        if not self.drafting:
            return
        if self.choice is not None:
            yield from self._drafting_notice(self.choice)
        if self.scheduler is not None and self.block > 1 and self.figures.misses >= HOPELESS_CYCLES:
            self.block = 1
            self.scheduler.stop_drafting()
            yield Notice(
                f"no draft was accepted in {HOPELESS_CYCLES} cycles: continuing without drafts; "
                "is this the drafter of this target?",
                "warning",
            )
        band = self.session.facts.acceptance_band
        # What is cut says nothing of the whole block: that is what the confidences of its drafts promise.
        whole = None if self.choice is None else _of_whole_blocks(self.choice)
        if band is not None and self.figures.below(band, whole):
            yield Notice(f"acceptance length below {band:g} for {ALARM_CYCLES} cycles; {self._causes()}", "warning")

    def _causes(self) -> str:
        templated = bool(self.request.messages)
        found = likely_causes(self.session.facts, self.request.thinking if templated else None, templated)
        return f"likely causes: {'; '.join((*found, 'text unlike its training'))}"

    def _drafting_notice(self, choice: DrafterChoice) -> Iterator[Event]:
        """Return a notice that drafting stops or comes back, once each."""
        drafts, control = choice.drafts, choice.control
        if drafts == self.drafts:
            return
        self.drafts = drafts
        if drafts in self.announced:
            return
        self.announced.add(drafts)
        rows = control.rival()
        corrected = ", corrected by the experts taken since" if self.runner.experts is not None else ""
        figures = (
            f"about {control.expected(rows):.2f} tokens per cycle of {control.costs[rows]:.1f} ms, "
            f"without drafts one per {control.costs[1]:.1f} ms (costs measured at load{corrected})"
        )
        if drafts:
            yield Notice(f"drafting pays again: {figures}")
            return
        text = f"drafting does not pay here: {figures}; continuing without drafts, trying them now and then"
        band = self.session.facts.acceptance_band
        if band is not None and _of_whole_blocks(choice) < band:
            yield Notice(f"{text}; {self._causes()}", "warning")
        else:
            yield Notice(text)

    def _finish(self, reason: FinishReason) -> Finished:
        self.stats = self.figures.stats(len(self.said))
        stop, thought = ("", 0) if self.stream is None else (self.stream.stop, self.stream.thinking_tokens)
        return Finished(reason, Usage(len(self.rendered.ids), len(self.said), thought), self.stats, stop)


def _of_whole_blocks(choice: DrafterChoice) -> float:
    """Count tokens that are expected of a cycle of all rows of the drafter, as published bands are."""
    control = choice.controls[0]
    return control.expected(control.longest)
