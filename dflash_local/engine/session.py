"""A loaded pair: what it is, which prompt tokens its caches can keep, and ``generate``, one request at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import torch

from dflash_local.chat.answer_ids import AnswerIds, answer_ids
from dflash_local.chat.call_grammar import forced_call
from dflash_local.chat.channels import prompt_opens_thinking
from dflash_local.chat.template import Rendered, render
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.engine import device_faults
from dflash_local.engine.conversations import Conversations, room_of
from dflash_local.engine.generation_loop import GenerationLoop, SetAside
from dflash_local.engine.grammar import Grammar, Vocabulary
from dflash_local.engine.runner import PlainStep, Runner
from dflash_local.engine.scheduler import Scheduler
from dflash_local.errors import ContextError, DeviceLostError, DoesNotFitError, Interrupted, UsageError
from dflash_local.events import Event, Notice, Stats
from dflash_local.kernels.allocate import make_current
from dflash_local.loaded import HeldCount, SessionFacts, nothing_done
from dflash_local.request import Request
from dflash_local.store.confidence_record import ConfidenceRecord
from dflash_local.store.said_record import SaidRecord
from dflash_local.store.sequence_files import SequenceFiles


class Session:
    """A target, its drafter and their caches, ready to answer one request after another.

    Attributes:
        drafts: False where the drafter is not to be used: every request is answered in mode ``ar``.
        observe: told the figures of each reply that ended. confidences, said: what is learnt of them, and the ids that
            they say, are kept there then.
        conversations: on the device, and those that wait. locks: released behind the model, when it is closed.
    """

    def __init__(
        self, runner: Runner, facts: SessionFacts, tokenizer: Tokenizer | None, stop_ids: frozenset[int]
    ) -> None:
        self.runner, self.facts, self.tokenizer, self.stop_ids = runner, facts, tokenizer, stop_ids
        self.schedulers: dict[bool, Scheduler] = {}  # what was learnt, by whether sampling is greedy
        self.guided_schedulers: dict[bool, Scheduler] = {}  # of replies held to a grammar, which replaces drafts
        self._plain: tuple[object, PlainStep] | None = None  # of the last plain reply, and how that was sampled
        self.drafts = True
        self.observe: Callable[[Stats], None] = lambda _stats: None
        self.confidences = ConfidenceRecord(None)
        self.said: SaidRecord | None = None
        self.locks = ExitStack()
        self.conversations = Conversations(runner, int(facts.load.cache_memory * 2**30))
        self._vocabulary: Vocabulary | None = None  # made for the first constraint
        self._answers: dict[tuple[bool, bool], AnswerIds] = {}  # likewise, by what ``answer_ids`` takes
        self._lost = False  # the device's context is
        self._counted: tuple[object, Rendered | None] = None, None  # what was rendered last, to be counted
        self._running: GenerationLoop | None = None  # the reply whose sequence is on the device

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Answer ``request``: events up to and including ``Finished``.

        The prompt is prepared in this call and the reply is made by the iterator that it returns: an error of the
        call, whatever it is, leaves the engine as it was.

        Args:
            cancelled: polled while the prompt is prepared, between cycles and between prompt chunks; True ends the
                reply there.

        Raises:
            ContextError: the prompt is longer than the context.
            UsageError: the pair cannot do what the request needs; (from the iterator) no token meets its constraint.
            CheckpointError: the chat template or the tokenizer cannot take the prompt.
            EngineError: (from the iterator) the engine broke; caches are dropped, the next request starts cold.
            DoesNotFitError: (from the iterator) memory ran out; a notice names the context that holds from then on.
            DeviceLostError: (from the iterator) nothing of this session can be used any more.
        """
        if not self.drafts:
            request = replace(request, mode="ar", block_size=None)
        try:
            (what, known), self._counted = self._counted, (None, None)
            rendered = known if known is not None and what == self._read(request) else self.render(request, cancelled)
        except Interrupted:
            return iter((nothing_done(self.facts, request),))
        self._check(request, rendered)
        grammar = self._grammar(request, rendered) if request.constraint or request.must_call else None
        return self._events(request, rendered, cancelled, grammar)

    def _events(
        self, request: Request, rendered: Rendered, cancelled: Callable[[], bool], grammar: Grammar | None
    ) -> Iterator[Event]:
        yield from (Notice(text, "warning") for text in rendered.notices)
        loop, whole, held = GenerationLoop(self, request, rendered, cancelled, grammar), False, 0
        self._running = loop
        try:
            make_current(self.runner.device)  # this thread may be another one than what loaded it
            for event in loop.events():
                yield event
                if loop.aside is not None and not cancelled():
                    self._bring_back(loop, loop.aside)
            whole = True
        except (RuntimeError, MemoryError) as error:
            self._lost = device_faults.is_lost(error)
            if self._lost:
                raise DeviceLostError(
                    f"the device's context is lost: {device_faults.first_line(error)}",
                    "it happens after a suspend or a fault of the driver; start the program again",
                ) from error
            if not device_faults.is_out_of_memory(error):
                raise
        finally:
            if loop.aside is not None:
                self.conversations.held.most_bytes += loop.aside.sequence.nbytes
                self.conversations.held.keep(loop.aside.sequence)
            elif self._running is loop:
                self._running = None
                held = 0 if self._lost else len(self.runner.committed)
                if not whole and not self._lost:  # whatever broke, half-written caches must not answer the next request
                    self.conversations.begin_anew()
        if whole:
            self.observe(loop.stats)
            if request.mode == "ar" and loop.figures.plain is not None:
                self._plain = _manner(request), loop.figures.plain
            if (scheduler := self.schedulers.get(request.sampling.greedy)) is not None:
                self.confidences.keep(request.sampling.greedy, scheduler.learnt)
            if self.said is not None and self.tokenizer is not None:
                self.said.add(self.tokenizer.vocabulary, loop.said)
        else:  # its frames are gone, and with them what they held
            yield from self._shrink(held)

    @torch.inference_mode()
    def set_aside(self) -> bool:
        """Copy the reply under way to host memory, where its iterator stands, so that another may begin; it comes back
        as its iterator goes on. False: there is no room for it, or the engine cannot.

        What it takes is a part of ``--cache-memory``. It says what it says alone: all that its cycles depend on is
        copied, and noise follows from seed and position.
        """
        loop, kept = self._running, self.conversations
        if loop is None:
            return True
        try:
            if not loop.set_aside(kept.points, kept.turn, room_of(kept.held.most_bytes)):
                return False
        except (RuntimeError, MemoryError) as error:
            if not device_faults.is_out_of_memory(error):
                raise
            return False
        assert loop.aside is not None
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)  # so that its time is known
        kept.held.most_bytes -= loop.aside.sequence.nbytes
        self._running, kept.turn = None, 0  # what is left on the device need not be held once more
        return True

    @torch.inference_mode()
    def _bring_back(self, loop: GenerationLoop, aside: SetAside) -> None:
        """Let a reply that was set aside go on, and hold the conversation that is on the device now."""
        held, kept = aside.sequence, self.conversations
        kept.leave(held.ids)
        kept.held.most_bytes += held.nbytes
        self._running, kept.turn, kept.points = loop, aside.turn, list(held.points)
        kept.index.truncate(0)
        loop.bring_back()

    def _shrink(self, held: int) -> Iterator[Event]:
        """Go on with less after memory ran out. Raises DoesNotFitError: always, after a notice of a smaller context."""
        device_faults.release_memory(self.runner.device)
        before = self.facts.context
        context = device_faults.smaller_context(before, held)
        if context < before:
            self.facts = replace(self.facts, load=replace(self.facts.load, context=context))
            yield Notice(f"the context is {context:,} tokens from now on, no longer {before:,}", "warning")
        raise DoesNotFitError(
            f"the device ran out of memory with {held:,} tokens in the context",
            "the session goes on: send less, or begin a new chat; another program may have taken some memory",
        )

    def render(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Rendered:
        """Return the prompt's ids: the chat template's, or those of the text or the ids given. Control texts are
        control tokens in a ``prompt``, to which a template may have been applied; in ``messages`` they are text.
        """
        ids, context = request.prompt_ids, self.facts.context
        if not ids and self.tokenizer is None:
            raise UsageError(f"{self.facts.target} has no tokenizer", "give the prompt as --prompt-ids 1,2,3")
        if self.tokenizer is not None and request.messages:
            return render(
                self.tokenizer,
                request.messages,
                thinking=request.thinking,
                tools=request.tools,
                effort=request.reasoning_effort,
                continues=request.continues,
                context=context,
                cancelled=cancelled,
            )
        if self.tokenizer is not None and request.prompt:
            ids = tuple(self.tokenizer.encode_prompt(request.prompt, context, cancelled))
        opens = self.tokenizer is not None and prompt_opens_thinking(self.tokenizer, ids)
        return Rendered(ids, len(ids), opens)

    def count(self, request: Request) -> int:
        """Return how many ids ``render`` makes; from any thread, since caches and device are left alone. They are kept
        for the reply that follows.
        """
        what, rendered = self._read(request), self.render(request)
        self._counted = what, rendered
        return len(rendered.ids)

    def _read(self, request: Request) -> tuple[object, ...]:
        """Return all that ``render`` makes ids of; of tools as they are written: 1 and true are equal elsewhere."""
        text = request.messages, request.prompt, request.prompt_ids, repr(request.tools)
        return *text, request.thinking, request.reasoning_effort, request.continues, self.facts.context

    def plain_step(self, request: Request) -> PlainStep | None:
        """Return what a step without drafts takes in such a reply: as in the last plain one of this load that chose its
        tokens in the same way, else as measured at load.
        """
        if self._plain is not None and self._plain[0] == _manner(request):
            return self._plain[1]
        return self.runner.plain

    def _check(self, request: Request, rendered: Rendered) -> None:
        count, context = len(rendered.ids), self.facts.context
        if count > context:
            raise ContextError(
                f"the prompt has {count} tokens, the context holds {context}", "shorten it or load a larger context"
            )
        vocab = self.runner.vocab_size
        for token in rendered.ids:
            if not 0 <= token < vocab:
                raise UsageError(f"prompt id {token} is outside the vocabulary of {vocab}")
        if request.limits.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer", f"{self.facts.target} has none")
        if request.mode == "dflash":
            if self.runner.proposer is None and not self.facts.drafting:
                raise UsageError(f"{self.facts.target} was loaded without a drafter", "pass --drafter or --mode ar")
            if request.block_size is not None and request.block_size > self.facts.block_size:
                raise UsageError(
                    f"block size {request.block_size} is larger than the trained one, {self.facts.block_size}",
                    f"use 1..{self.facts.block_size}",
                )

    def _grammar(self, request: Request, rendered: Rendered) -> Grammar:
        """Return what holds the reply to its constraint or to a call. UsageError: it is refused, or the model takes
        none.
        """
        if self.tokenizer is None or not self.stop_ids:
            lacks = "tokenizer" if self.tokenizer is None else "token that ends a reply"
            raise UsageError(f"a reply cannot be constrained: {self.facts.target} has no {lacks}", "leave it out")
        constraint = request.constraint or forced_call(self.tokenizer, request)
        forced = bool(request.must_call)
        how = bool(request.tools) and not forced, forced
        if how not in self._answers:
            self._answers[how] = answer_ids(self.tokenizer, *how)
        answers = self._answers[how]
        place = answers.begin(rendered.ids, rendered.opens_thinking)
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self.tokenizer, self.runner.vocab_size, self.stop_ids, self.runner.device)
        matcher = self._vocabulary.matcher(constraint, "schema of a tool that must be called" if forced else "")
        return Grammar(self._vocabulary, matcher, answers, place)

    def keep_on_disk(self, files: SequenceFiles | None) -> None:
        """Move what host memory has no room for, and all when this is closed, to files; and look for prompts there."""
        self.conversations.held.files = files

    def held(self) -> tuple[HeldCount, ...]:
        """Count the conversations that a prompt may go on from; from any thread."""
        tokens = len(self.runner.committed)
        return HeldCount("device", int(tokens > 0), tokens, None), *self.conversations.held.counts()

    def reset(self) -> None:
        """Forget all conversations."""
        self.conversations.held.clear()
        self.conversations.begin_anew()

    @torch.inference_mode()
    def close(self) -> None:
        if not self._lost:
            self.conversations.save()
        self.conversations.points.clear()
        self.conversations.held.clear()
        if self.tokenizer is not None:
            if self.said is not None:
                self.said.write(self.tokenizer.vocabulary)
            self.tokenizer.close()
        with self.locks:
            try:
                self.runner.close()
            except RuntimeError:
                if not self._lost:
                    raise


def _manner(request: Request) -> object:
    """Return all of a request that changes how long the choice of a token takes."""
    return replace(request.sampling, seed=None), request.constraint, request.must_call, request.logprobs
