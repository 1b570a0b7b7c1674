"""The Race tab: one prompt with and without drafting, run one after the other, replayed side by side."""

from __future__ import annotations

import asyncio
import html
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.components import Component

from dflash_local.app.served_pair import ServedPair
from dflash_local.errors import DFlashError
from dflash_local.events import Mode
from dflash_local.request import Request, user_request
from dflash_local.service.chat_options import merged
from dflash_local.service.race import MODES, Lane, Race, Racer
from dflash_local.service.service import Service
from dflash_local.ui.figures import NONE, rate
from dflash_local.ui.race_run import NAMES, RaceRun, Track
from dflash_local.ui.web import markup
from dflash_local.ui.web.chat_settings import line
from dflash_local.ui.web.chat_view import chat_options
from dflash_local.ui.web.reply import waiting_for
from dflash_local.ui.web.visitors import Visitor, Visitors

TOKENS = 256
PULSE_S = 0.1
SHOWN_CHARS = 20_000  # of a lane: its end is what is read while it runs
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
        self.lanes = gr.HTML(lanes({mode: Track() for mode in MODES}), elem_classes="df-plain")
        self.result = gr.HTML(elem_classes=["df-plain", "df-maybe"])
        how: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}
        asked: set[Block] = {self.prompt, self.limit, self.temperature, self.seed}
        drawn = [self.status, self.lanes, self.result, self.stop]
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
            yield {self.result: "", **self._drawn(run, self._state(run))}
            async for changes in self._run(visitor, run, prompt):
                yield changes

    def _racer(self, asked: Request) -> Racer:
        self._served.service.load()
        return Racer(self._served.service, asked)

    def _state(self, run: RaceRun) -> str:
        return run.state if run.prepared else waiting_for(self._served.service)

    async def _run(self, visitor: Visitor, run: RaceRun, prompt: str) -> AsyncIterator[Changes]:
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
        run.replay()
        while not run.shown and not run.stopped:
            run.advance()
            yield self._drawn(run, "replay at true speed; Stop goes to the end", race)
            await asyncio.sleep(PULSE_S)
        run.advance(float("inf"))
        source = await asyncio.to_thread(self._served.provenance)
        words = {"prompt": prompt, "verdict": race.verdict, "ratios": race.ratios}
        save = markup.saved("Save as JSON", "race.json", {**source, **words, **race.as_dict()})
        yield {**self._drawn(run, "", race), self.result: result(race, save), self.stop: gr.update(interactive=False)}

    def _stop(self, request: gr.Request) -> None:
        self._visitors.of(request).cancel("race")

    def _offer(self, prompt: str = "") -> Any:
        """Let a built-in prompt of another pair give way to one of this pair: the window may have been elsewhere."""
        texts = self._served.examples
        stale = not prompt or (prompt in self._offered and prompt not in texts)
        self._offered.update(texts)
        return texts[0] if stale and texts else gr.skip()

    def _drawn(self, run: RaceRun, state: str, race: Race | None = None) -> Changes:
        """Draw all of a race that goes on, so that no update depends on one that came before."""
        return {
            self.status: markup.paragraph(state),
            self.lanes: lanes(run.tracks, race),
            self.stop: gr.update(interactive=True),
        }


def lanes(tracks: dict[Mode, Track], race: Race | None = None) -> str:
    known = {lane.mode: lane for lane in (race.ar, race.dflash)} if race is not None else {}
    return f'<div class="df-lanes">{"".join(_lane(mode, tracks[mode], known.get(mode)) for mode in MODES)}</div>'


def _lane(mode: Mode, track: Track, lane: Lane | None) -> str:
    share = round(100 * track.tokens / max(1, lane.tokens)) if lane is not None else 100 * (track.speed is not None)
    return (
        f'<section class="df-lane df-lane-{mode}"><h3>{NAMES[mode]}</h3>'
        f'<div class="df-track"><div style="width:{share}%"></div></div>'
        f'<p class="df-count">{track.line}</p>'
        f'<div class="df-said" tabindex="0"><div>{html.escape(track.text[-SHOWN_CHARS:])}</div></div></section>'
    )


def result(race: Race, link: str) -> str:
    """Show the figures of both, the verdict, and the link that saves them."""

    def acceptance(lane: Lane) -> str:
        length = lane.finished.stats.mean_acceptance_length
        return NONE if length is None or lane.mode == "ar" else f"{length:.2f}"

    both = (race.ar, race.dflash)
    rows = [
        ("time", *(f"{lane.seconds:.2f} s" for lane in both), f"{race.wall_clock:.2f}x"),
        ("tokens", *(str(lane.tokens) for lane in both), ""),
        ("tok/s", *(rate(lane.finished.stats.tokens_per_s) for lane in both), f"{race.speed_up:.2f}x"),
        ("acceptance length", *(acceptance(lane) for lane in both), ""),
    ]
    table = markup.table(("", "AR", "DFlash", "ratio"), rows)
    same = "yes" if race.first_difference is None else "no"
    verdict = f'<p class="df-verdict df-same-{same}">{markup.word(race.verdict)}</p>'
    return (
        f'<div class="df-result">{verdict}<p>{markup.word(f"{race.ratios} · seed {race.seed}")}</p>{table}{link}</div>'
    )
