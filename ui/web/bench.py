"""The Bench tab: the built-in prompts with and without drafting, a table that fills, and plots of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import gradio as gr
import pandas as pd

from dflash_local.app.served_pair import ServedPair
from dflash_local.bench.prompts import Prompt
from dflash_local.errors import DFlashError
from dflash_local.service.race import NAMES
from dflash_local.ui.job import Job
from dflash_local.ui.web import bench_run, markup
from dflash_local.ui.web.bench_run import BenchRun
from dflash_local.ui.web.visitors import Visitors

TOKENS = 128
DRAW_S = 1.0  # of two plots that come sooner one after the other, Gradio may keep the first
COLOURS = {NAMES["ar"]: "#8a94a6", NAMES["dflash"]: "#0d9488"}
MEASURED = "Measured here, in this run; no figure is remembered or quoted."
EXPLAINED = (
    "Each prompt is answered without drafting and with it, one after the other, from the same loaded pair, greedily. "
    "Ratio: decode speed of the drafted reply over the plain one. Acceptance length: accepted drafts + 1, mean over "
    "the drafted blocks."
)
FILE = "dflash-bench.json"
Updates = list[Any]


class BenchTab:
    def __init__(self, served: ServedPair, visitors: Visitors, opened: gr.Tab) -> None:
        self._served, self._visitors = served, visitors
        gr.HTML(markup.paragraph(EXPLAINED))
        self.prompts = gr.CheckboxGroup(label="Prompts", choices=[], elem_id="df-prompts")
        self.tokens = gr.Slider(
            16, 1024, TOKENS, step=16, label="Tokens in a reply at most", buttons=[], elem_id="df-tokens"
        )
        with gr.Row(elem_classes="df-actions"):
            self.run = gr.Button("Run", variant="primary", elem_id="df-run", min_width=110)
            self.stop = gr.Button("Stop", interactive=False, elem_id="df-stop", min_width=110)
        self.status = gr.HTML(elem_id="df-bench-status", elem_classes="df-maybe")
        self.table = gr.HTML(apply_default_css=False, elem_id="df-bench-table")
        self.saved = gr.HTML(elem_id="df-bench-file", elem_classes="df-maybe")
        with gr.Column(visible=False, elem_id="df-plots") as self.plots:
            with gr.Row(elem_classes="df-actions"):
                self.positions = gr.BarPlot(**_POSITIONS, elem_id="df-plot-positions")
                self.speeds = gr.BarPlot(**_SPEEDS, elem_id="df-plot-prompts")
            self.which = gr.Dropdown(label="Speed over time of", choices=[], elem_id="df-which")
            self.time = gr.LinePlot(**_TIME, elem_id="df-plot-time")
        self._connect(opened)

    def _connect(self, opened: gr.Tab) -> None:
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        opened.select(self._offer, None, self.prompts, **quiet)
        shown = [self.run, self.stop, self.status, self.table, self.saved]
        drawn = [self.plots, self.positions, self.speeds, self.which, self.time]
        self.run.click(self._run, [self.prompts, self.tokens], [*shown, *drawn], trigger_mode="once", **quiet)
        self.stop.click(self._stop, None, self.stop, **quiet)
        self.which.input(self._speed_of, self.which, self.time, **quiet)

    def _offer(self) -> Any:
        """Offer the prompts for the pair that is served now; another pair may have others."""
        labels = _labels(self._prompts())
        return gr.update(choices=labels, value=[value for _, value in labels])

    def _prompts(self) -> Sequence[Prompt]:
        try:
            return self._served.bench_prompts()
        except DFlashError:  # the run says why
            return ()

    async def _run(self, chosen: list[int], tokens: float, request: gr.Request) -> AsyncIterator[Updates]:
        try:
            prompts = await asyncio.to_thread(self._served.bench_prompts)
            picked = [prompt for index, prompt in enumerate(prompts) if index in (chosen or ())]
            run = BenchRun(self._served.service, picked, int(tokens))
        except DFlashError as error:
            yield [*_shown(False, markup.failed(error)), *[gr.skip()] * 5]
            return
        visitor, job = self._visitors.of(request), Job(run.run, run.stop)
        visitor.bench = run
        with visitor.runs("bench", job):
            yield [*_shown(True, markup.progress(run.line, 0.0), ""), *_cleared()]
            done, drawn = 0, time.monotonic()
            async for _ in job.pulses():
                if len(run.rows) > done and time.monotonic() - drawn > DRAW_S:
                    done, drawn = len(run.rows), time.monotonic()
                    yield [*_shown(True, markup.progress(run.line, run.fraction), _table(run)), *_drawn(run)]
                else:
                    yield [*_shown(True, markup.progress(run.line, run.fraction)), *[gr.skip()] * 5]
            source = await asyncio.to_thread(self._served.provenance) if run.rows else {}
            yield _ended(job, run, source)

    def _stop(self, request: gr.Request) -> Any:
        self._visitors.of(request).cancel("bench")
        return gr.update(interactive=False)

    def _speed_of(self, which: int, request: gr.Request) -> Any:
        run = self._visitors.of(request).bench
        rows = run.rows if run is not None else []
        return _time(rows[which]) if isinstance(which, int) and 0 <= which < len(rows) else gr.skip()


_POSITIONS: dict[str, Any] = {
    "x": "draft slot",
    "y": "accepted",
    "title": "Acceptance per position",
    "x_title": "draft slot",
    "y_title": "share of blocks",
    "y_lim": [0, 1],
    "y_axis_format": ".0%",
    "height": 260,
    "min_width": 320,
}
_SPEEDS: dict[str, Any] = {
    "x": "prompt",
    "y": "tok/s",
    "color": "mode",
    "title": "Plain against drafted",
    "x_title": "prompt of the table",
    "x_label_angle": -50,
    "color_title": " ",
    "color_map": COLOURS,
    "height": 260,
    "min_width": 320,
}
_TIME: dict[str, Any] = {
    "x": "seconds",
    "y": "tok/s",
    "color": "mode",
    "title": "Speed over time",
    "color_title": " ",
    "color_map": COLOURS,
    "x_lim": [0, None],
    "height": 260,
}


def _labels(prompts: Sequence[Prompt]) -> list[tuple[str, int]]:
    return [(f"{prompt.kind}: {prompt.text or 'ids'}", index) for index, prompt in enumerate(prompts)]


def _shown(running: bool, status: str, table: str | None = None, link: str = "") -> Updates:
    """Update run, stop, status, table (None leaves it as it is), file."""
    shown = gr.skip() if table is None else table
    return [gr.update(interactive=not running), gr.update(interactive=running), status, shown, link]


def _ended(job: Job[None], run: BenchRun, source: Mapping[str, Any]) -> Updates:
    """Show all rows that were done, and what can be saved of them."""
    status = markup.paragraph(MEASURED) if job.error is None else markup.failed(job.error)
    if not run.rows:
        return [*_shown(False, status, ""), *[gr.skip()] * 5]
    link = markup.saved("Save as JSON", FILE, bench_run.report(run, source))
    return [*_shown(False, status, _table(run), link), *_drawn(run)]


def _table(run: BenchRun) -> str:
    rows = [row.cells(number) for number, row in enumerate(run.rows, 1)]
    if not rows:
        return ""
    return markup.table(bench_run.TITLES, rows, bench_run.totals(run.rows).cells)


def _drawn(run: BenchRun) -> Updates:
    """Draw the plots, those over time of the last prompt."""
    positions = pd.DataFrame(
        [(str(slot), share) for slot, share in bench_run.per_position(run.rows)], columns=["draft slot", "accepted"]
    )
    speeds = pd.DataFrame(bench_run.per_prompt(run.rows), columns=["prompt", "mode", "tok/s"])
    names = [(f"{index + 1} {row.prompt.kind}", index) for index, row in enumerate(run.rows)]
    return [
        gr.update(visible=True),
        gr.BarPlot(positions, sort=list(positions["draft slot"])),
        gr.BarPlot(speeds, sort=list(speeds["prompt"]), y_lim=_limits(speeds)),
        gr.update(choices=names, value=len(names) - 1),
        _time(run.rows[-1]),
    ]


def _cleared() -> Updates:
    """Clear an earlier run. Empty plots, not hidden ones: Gradio's fail in the browser while they change."""
    positions, speeds, time = (
        pd.DataFrame({name: [] for name in names})
        for names in (("draft slot", "accepted"), ("prompt", "mode", "tok/s"), ("seconds", "mode", "tok/s"))
    )
    return [gr.skip(), positions, speeds, gr.update(choices=[], value=None), time]


def _time(row: bench_run.BenchRow) -> Any:
    points = pd.DataFrame(bench_run.over_time(row), columns=["seconds", "mode", "tok/s"])
    return gr.LinePlot(points, y_lim=_limits(points))


def _limits(points: pd.DataFrame) -> list[float | None]:
    """Reach from nothing to a little over the fastest, so that no bar or line is cut."""
    return [0, 1.08 * float(points["tok/s"].max()) if len(points) else None]
