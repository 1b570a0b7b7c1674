"""The Race tab: one prompt with and without drafting, run one after the other, replayed side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.components import Component

from dflash_local.app.served_pair import ServedPair
from dflash_local.errors import DFlashError
from dflash_local.report.race_file import About, command, load_options
from dflash_local.request import Request, user_request
from dflash_local.service.chat_options import merged
from dflash_local.service.race import MODES, Racer
from dflash_local.service.race_lanes import Track
from dflash_local.service.service import Service
from dflash_local.ui.race_run import RaceRun
from dflash_local.ui.web import markup
from dflash_local.ui.web.chat_settings import line
from dflash_local.ui.web.chat_view import chat_options
from dflash_local.ui.web.race_view import FRAME, measured, replayed
from dflash_local.ui.web.reply import waiting_for
from dflash_local.ui.web.visitors import Visitor, Visitors

TOKENS = 256
PULSE_S = 0.1
Given = dict[Component, Any]
Changes = dict[Component, Any]


def race_request(service: Service, prompt: str, tokens: Any, temperature: Any, seed: Any) -> Request:
    """What races; without a temperature it is greedy.

    Raises:
        UsageError: a value is not allowed.
    """
    options = chat_options(service, max_new_tokens=tokens, temperature=temperature or 0, seed=seed)
    limits = options.limits if tokens else replace(options.limits, max_new_tokens=TOKENS)
    own = replace(service.model.sampling, temperature=0.0)
    return user_request(prompt, sampling=merged(own, options.sampling), limits=limits, thinking=options.thinking)


class RaceTab:
    def __init__(self, served: ServedPair, visitors: Visitors, opened: gr.Tab) -> None:
        self._served, self._visitors = served, visitors
        self._offered: set[str] = set()  # built-in prompts that stood in a field
        with gr.Row(elem_classes="df-composer"):
            self.prompt = gr.Textbox(show_label=False, container=False, lines=2, max_lines=8, scale=8, min_width=240)
            self.start = gr.Button("Race", variant="primary", scale=1, min_width=80)
            self.stop = gr.Button("Stop", scale=1, min_width=80, interactive=False)
        with gr.Accordion("Settings", open=False), gr.Row():
            self.limit = line("Most tokens", str(TOKENS), str(TOKENS))
            self.temperature = line("Temperature", "0", "0: greedy")
            self.seed = line("Seed", "", "random")
        self.status = gr.HTML(elem_classes=["df-plain", "df-status"])
        self.lanes = gr.HTML(measured({mode: Track() for mode in MODES}), js_on_load=FRAME, elem_classes="df-plain")
        how: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}
        asked: set[Block] = {self.prompt, self.limit, self.temperature, self.seed}
        drawn = [self.status, self.lanes, self.stop]
        gr.on([self.start.click, self.prompt.submit], self._race, asked, drawn, trigger_mode="once", **how)
        self.stop.click(self._stop, None, None, **how)
        gr.on(None, self._offer, None, [self.prompt], **how)
        opened.select(self._offer, [self.prompt], [self.prompt], **how)

    async def _race(self, given: Given, request: gr.Request) -> AsyncIterator[Changes]:
        visitor = self._visitors.of(request)
        prompt = given[self.prompt] or ""
        try:
            asked = race_request(
                self._served.service, prompt, given[self.limit], given[self.temperature], given[self.seed]
            )
        except DFlashError as error:
            yield {self.status: markup.failed(error)}
            return
        run = RaceRun(lambda _notify: self._racer(asked))
        with visitor.runs("race", run):
            yield self._drawn(run, self._state(run))
            async for changes in self._run(visitor, run, prompt, asked):
                yield changes

    def _racer(self, asked: Request) -> Racer:
        self._served.service.load()
        return Racer(self._served.service, asked)

    def _state(self, run: RaceRun) -> str:
        return run.state if run.prepared else waiting_for(self._served.service)

    async def _run(self, visitor: Visitor, run: RaceRun, prompt: str, asked: Request) -> AsyncIterator[Changes]:
        seen: tuple[int, str] | None = None
        async for _ in run.pulses(PULSE_S):
            now = (run.version, self._state(run))
            if seen != now:
                seen = now
                yield self._drawn(run, now[1])
        if run.error is not None:
            yield {self.status: markup.failed(run.error), self.stop: gr.update(interactive=False)}
            return
        race = run.result
        visitor.chat.look(race.ar.finished.stats)
        source = await asyncio.to_thread(self._served.provenance)
        service, name = self._served.service, self._served.service.model.name
        options = load_options(self._served.pair, service.facts, bool(self._served.decided))
        about = About(name, prompt, command(name, prompt, asked, race.seed, options), source)
        # On a thread: it takes seconds where both replies are long.
        links, frame = await asyncio.to_thread(replayed, race, about)
        yield {self.status: links, self.lanes: frame, self.stop: gr.update(interactive=False)}

    def _stop(self, request: gr.Request) -> None:
        self._visitors.of(request).cancel("race")

    def _offer(self, prompt: str = "") -> Any:
        """Let a built-in prompt of another pair give way to one of this pair: the window may have been elsewhere."""
        texts = self._served.examples
        stale = not prompt or (prompt in self._offered and prompt not in texts)
        self._offered.update(texts)
        return texts[0] if stale and texts else gr.skip()

    def _drawn(self, run: RaceRun, state: str) -> Changes:
        """Draw all of a race that goes on, so that no update depends on one that came before."""
        return {
            self.status: markup.paragraph(state),
            self.lanes: measured(run.tracks, run.measuring),
            self.stop: gr.update(interactive=True),
        }
