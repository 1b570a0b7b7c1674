"""The About tab: what runs here, and a certificate that the text is the target's own."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import gradio as gr

from dflash_local.app.served_pair import ServedPair
from dflash_local.errors import DFlashError
from dflash_local.ui.job import Job
from dflash_local.ui.web import markup
from dflash_local.ui.web.visitors import Visitors

FILE = "dflash-certificate.json"
EXPLAINED = (
    "The certificate answers a few prompts with and without drafting, greedily and sampled, and explains every "
    "difference. It runs in a process of its own: the pair is unloaded meanwhile, and loaded again by the next request."
)
TITLES = ("Prompt", "Case", "Block", "Tokens", "Per cycle", "Verdict")
Updates = list[Any]


class AboutTab:
    def __init__(self, served: ServedPair, visitors: Visitors, opened: gr.Tab) -> None:
        self._served, self._visitors = served, visitors
        self.facts = gr.HTML(apply_default_css=False, elem_id="df-about")
        gr.HTML(markup.paragraph(EXPLAINED))
        with gr.Row(elem_classes="df-actions"):
            self.make = gr.Button("Make the certificate", variant="primary", elem_id="df-certify", min_width=230)
            self.cancel = gr.Button("Cancel", interactive=False, elem_id="df-certify-cancel", min_width=110)
        self.status = gr.HTML(elem_id="df-certificate", elem_classes="df-maybe")
        self.runs = gr.HTML(apply_default_css=False, elem_id="df-certificate-runs", elem_classes="df-maybe")
        self.saved = gr.HTML(elem_id="df-certificate-file", elem_classes="df-maybe")
        self._connect(opened)

    def _connect(self, opened: gr.Tab) -> None:
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        opened.select(self._facts, None, self.facts, **quiet)
        shown = [self.make, self.cancel, self.status, self.runs, self.saved]
        made = self.make.click(self._make, None, shown, trigger_mode="once", **quiet)
        made.then(self._facts, None, self.facts, **quiet)
        self.cancel.click(self._cancel, None, self.cancel, **quiet)

    def _facts(self) -> str:
        try:
            return markup.facts(self._served.about())
        except DFlashError as error:
            return markup.failed(error)

    async def _make(self, request: gr.Request) -> AsyncIterator[Updates]:
        news = [("starting", 0.0)]
        stopped = threading.Event()
        job = Job(lambda: self._served.certify(lambda *far: news.append(far), stopped.is_set), stopped.set)
        with self._visitors.of(request).runs("about", job):
            async for _ in job.pulses(0.2):
                yield _shown(True, markup.progress(*news[-1]))
            try:
                yield _certificate(job.result)
            except DFlashError as error:
                yield _shown(False, markup.failed(error))

    def _cancel(self, request: gr.Request) -> Any:
        self._visitors.of(request).cancel("about")
        return gr.update(interactive=False)


def _shown(running: bool, status: str, runs: str = "", link: str = "") -> Updates:
    """Update make, cancel, status, runs, file."""
    return [gr.update(interactive=not running), gr.update(interactive=running), status, runs, link]


def _certificate(report: Mapping[str, Any]) -> Updates:
    """Show the verdict in the report's own words, its runs, and the report to be saved."""
    bug = report.get("verdict") == "BUG"
    words = markup.paragraph(f"Verdict: {report.get('statement', report.get('verdict'))}", "error" if bug else "note")
    words += "".join(markup.paragraph(str(report[name])) for name in ("promise", "note") if report.get(name))
    rows = [
        (
            run["prompt"] + 1,
            run["case"],
            run["block_size"],
            run["tokens"],
            "-" if run["mean_acceptance_length"] is None else f"{run['mean_acceptance_length']:.2f}",
            run["verdict"],
        )
        for run in report.get("runs", ())
    ]
    table = markup.table(TITLES, rows) if rows else ""
    return _shown(False, words, table, markup.saved("Save as JSON", FILE, report))
