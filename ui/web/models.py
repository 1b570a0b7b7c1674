"""The Models tab: the pairs as cards; the chosen one's load dialog, unloading, removing and details."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import gradio as gr

from dflash_local.app.model_entries import ModelEntry, in_order
from dflash_local.app.served_pair import ServedPair
from dflash_local.errors import DFlashError
from dflash_local.tables import rate
from dflash_local.ui.pair_text import pair_page
from dflash_local.ui.plan_text import speed_range
from dflash_local.ui.web import markup
from dflash_local.ui.web.load_dialog import LoadDialog
from dflash_local.ui.web.models_view import ModelsView, Pull
from dflash_local.ui.web.visitors import Visitors

LOOK_S = 0.2  # how often a window looks for news
SIGN_S = 3.0  # how often it says that it still looks, so that closed windows are found out
STATES = {
    "absent": "not here",
    "partial": "in part",
    "variant": "here, quantised",
    "local": "here",
    "bundled": "built in",
}
# Cards have a button each; which one is chosen is marked at once, without waiting for the server,
# and stays marked when cards come that were drawn before the click. Until its own load dialog
# comes, the one before it starts nothing.
CHOOSE = """
const mark = () => element.querySelectorAll('li[data-name]').forEach((row) => {
  const on = row.dataset.name === element.dataset.chosen;
  row.classList.toggle('df-chosen', on);
  row.querySelector('button').setAttribute('aria-pressed', on);
});
const adopt = () => {
  const rows = [...element.querySelectorAll('li[data-name]')];
  const first = element.querySelector('ul[data-chosen]');
  if (first && !rows.some((row) => row.dataset.name === element.dataset.clicked)) {
    element.dataset.chosen = first.dataset.chosen;
  }
  mark();
};
element.addEventListener('click', (event) => {
  const row = event.target.closest('li[data-name]');
  if (!row) return;
  element.dataset.chosen = element.dataset.clicked = row.dataset.name;
  mark();
  const plans = document.querySelector('#df-load-dialog .df-plans');
  if (plans && plans.dataset.pair !== row.dataset.name) {
    plans.querySelectorAll('.df-start').forEach((button) => { button.disabled = true; });
  }
  trigger('click', {name: row.dataset.name, columns: COLUMNS});
});
watch('value', adopt);
adopt();
"""
# What is open for reading stays open when it is drawn anew.
STAY_OPEN = """
let open = false;
element.addEventListener('toggle', (event) => { open = event.target.open; }, true);
watch('value', () => element.querySelectorAll('details').forEach((part) => { part.open = open; }));
"""
# How many columns of text the window holds; the details are laid out for them.
COLUMNS = "Math.floor((window.innerWidth - 100) / (window.innerWidth > 640 ? 7.8 : 6.8))"
FEWEST, MOST = 40, 96
Updates = list[Any]


class ModelsTab:
    def __init__(self, served: ServedPair, visitors: Visitors, opened: gr.Tab) -> None:
        self._models, self._served, self._visitors = ModelsView(served), served, visitors
        self.version = gr.State("")
        self.columns = gr.Number(MOST, visible=False)
        self.status_line = gr.HTML(elem_id="df-standing", elem_classes="df-maybe")
        self.pulling = gr.HTML(elem_id="df-pulling", elem_classes="df-maybe")
        self.cancel = gr.Button("Cancel the download", visible=False, elem_id="df-cancel-pull")
        self.pairs = gr.HTML(js_on_load=CHOOSE.replace("COLUMNS", COLUMNS), apply_default_css=False, elem_id="df-pairs")
        self.dialog = LoadDialog(self._models, visitors)
        with gr.Row(elem_classes="df-actions"):
            self.unload = gr.Button("Unload", interactive=False, elem_id="df-unload", size="md")
            self.remove = gr.Button("Remove", interactive=False, elem_id="df-remove", size="md")
            self.begin = gr.Button("Begin with it", elem_id="df-begin", size="md")
        with gr.Column(visible=False, elem_id="df-question") as self.question:
            self.asked = gr.HTML()
            with gr.Row(elem_classes="df-actions"):
                self.yes = gr.Button("Remove it", variant="stop", elem_id="df-yes", min_width=110)
                self.no = gr.Button("Keep it", elem_id="df-no", min_width=110)
        self.notice = gr.HTML(elem_id="df-models-notice", elem_classes="df-maybe")
        self.details = gr.HTML(js_on_load=STAY_OPEN, apply_default_css=False, elem_id="df-details")
        self._connect(opened)

    def _connect(self, opened: gr.Tab) -> None:
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        chosen = [self.details, self.unload, self.remove]
        view = [self.pairs, *chosen]
        seen: dict[str, Any] = {"inputs": self.columns, "js": f"() => {COLUMNS}"}
        now = [self.status_line, self.pulling, self.cancel]
        # One after the other, or a table drawn before a click could come after what was clicked for.
        alone: dict[str, Any] = {"concurrency_id": "df-models-view", "concurrency_limit": 1}
        drawn = opened.select(self._open, outputs=[*view, *now], **seen, **quiet, **alone)
        opened.select(
            self._watch,
            None,
            [*now, self.version],
            trigger_mode="once",
            concurrency_limit=None,
            **quiet,
        )
        changed = self.version.change(self._view, outputs=view, **seen, **quiet, **alone)
        asking = [self.question, self.asked, self.notice]
        clicked = self.pairs.click(self._choose, None, [*chosen, *asking], trigger_mode="multiple", **quiet, **alone)
        self.dialog.connect((drawn, changed, clicked), self.notice, quiet)
        self.unload.click(self._unload, None, self.notice, **quiet)
        self.cancel.click(self._cancel, None, self.notice, **quiet)
        self.remove.click(self._ask, None, asking, **quiet)
        self.begin.click(self._begin, None, self.notice, **quiet)
        self.yes.click(self._remove, None, asking, **quiet)
        self.no.click(lambda: self._asking(), None, asking, **quiet)

    async def _watch(self) -> AsyncIterator[Updates]:
        """Show every window what goes on, as long as it is open."""
        shown: tuple[object, ...] = ()
        until = 0.0
        while True:
            now = (*self._now(), self._models.version)
            if now != shown:
                shown, until = now, time.monotonic() + SIGN_S
                yield [now[0], now[1], gr.update(visible=now[2]), now[3]]
            elif time.monotonic() > until:
                until = time.monotonic() + SIGN_S
                yield [gr.skip()] * 4
            await asyncio.sleep(LOOK_S)

    def _now(self) -> tuple[str, str, bool]:
        """Return what goes on above the table, and whether there is a download to cancel."""
        return self._status(), _pulling(self._models.pull), self._models.pulling

    def _status(self) -> str:
        status = self._served.service.status
        if status.state == "loading" and status.progress is not None:
            return markup.progress(f"Loading: {status.progress.stage}", status.progress.fraction)
        return markup.paragraph(self._models.status_line, "error" if status.state == "broken" else "note")

    def _open(self, columns: float, request: gr.Request) -> Updates:
        """Draw all of the tab at once, so that nothing moves under the pointer afterwards."""
        status_line, pulling, running = self._now()
        self._visitors.of(request).order = []
        return [*self._view(columns, request), status_line, pulling, gr.update(visible=running)]

    def _view(self, columns: float, request: gr.Request) -> Updates:
        """Draw the table, and all that belongs to the chosen pair."""
        try:
            return self._drawn(self._listed(request), columns, request)
        except DFlashError as error:
            return [markup.failed(error), "", *[gr.update(interactive=False)] * 2]

    def _listed(self, request: gr.Request) -> Sequence[ModelEntry]:
        """List the pairs in the order that the window had them in: no row moves under the pointer."""
        entries, visitor = in_order(self._served.entries()), self._visitors.of(request)
        places = {name: place for place, name in enumerate(visitor.order)}
        entries.sort(key=lambda entry: places.get(entry.name, len(places)))
        visitor.order = [entry.name for entry in entries]
        return entries

    def _drawn(self, entries: Sequence[ModelEntry], columns: float, request: gr.Request) -> Updates:
        served, names = self._served, [entry.name for entry in entries]
        chosen = self._visitors.of(request).chosen or served.name
        if chosen not in names:
            chosen = next((name for name in names if served.service.model.answers_to(name)), names[0] if names else "")
        entry = next((entry for entry in entries if entry.name == chosen), None)
        cards = _cards(entries, chosen, served.name)
        self.dialog.ask(chosen, request)
        return [cards, self._details(chosen, columns), *self._buttons(entry)]

    def _choose(self, event: gr.EventData, request: gr.Request) -> Updates:
        try:
            entry = self._served.entry(str(getattr(event, "name", "")))
        except DFlashError as error:
            return [*[gr.skip()] * 3, *self._asking(markup.failed(error))]
        self._visitors.of(request).chosen = entry.name
        self.dialog.ask(entry.name, request)
        details = self._details(entry.name, getattr(event, "columns", MOST))
        return [details, *self._buttons(entry), *self._asking()]

    def _details(self, name: str, columns: float) -> str:
        width = min(max(int(columns), FEWEST), MOST)
        if not name:
            return ""
        try:
            text = markup.block("\n".join(pair_page(*self._served.details(name), width)))
        except DFlashError as error:
            return markup.failed(error)
        return f"<details><summary>All that is known of {markup.word(name)}</summary>{text}</details>"

    def _buttons(self, entry: ModelEntry | None) -> Updates:
        """Update unload and remove."""
        served = self._served
        kept = bool(served.service.model.kept_by)
        ready = served.service.status.state == "ready"
        loaded = ready and entry is not None and entry.name == served.name
        removable = entry is not None and entry.state in ("local", "partial", "variant") and not loaded
        return [gr.update(interactive=ready and not kept), gr.update(interactive=removable)]

    def _unload(self) -> str:
        try:
            self._served.service.unload()
        except DFlashError as error:
            return markup.failed(error)
        return ""

    def _begin(self, request: gr.Request) -> str:
        try:
            return markup.paragraph(self._served.begin_with(self._chosen(request)))
        except DFlashError as error:
            return markup.failed(error)

    def _cancel(self) -> str:
        pull = self._models.pull
        if pull is not None:
            pull.cancel()
        return ""

    def _ask(self, request: gr.Request) -> Updates:
        """Show what would go, before it goes."""
        chosen = self._chosen(request)
        try:
            what = self._served.removal(chosen)
        except DFlashError as error:
            return self._asking(markup.failed(error))
        lines = (f"Remove {chosen} from this machine?", *what.splitlines())
        text = "".join(map(markup.paragraph, lines))
        return [gr.update(visible=True), text, ""]

    def _remove(self, request: gr.Request) -> Updates:
        try:
            return self._asking(markup.paragraph(self._models.remove(self._chosen(request))))
        except DFlashError as error:
            return self._asking(markup.failed(error))

    def _chosen(self, request: gr.Request) -> str:
        """Name the pair that the window has chosen, or was shown at first."""
        asked = self._visitors.of(request).asked
        return asked.name if asked is not None else ""

    def _asking(self, notice: str = "") -> Updates:
        """Ask nothing, and show a notice."""
        return [gr.update(visible=False), "", notice]


def _pulling(pull: Pull | None) -> str:
    """Show the download under way, or what came of the last one."""
    if pull is None:
        return ""
    if not pull.running:
        return markup.paragraph(pull.verdict, "error" if pull.failed else "note")
    done, total, line = pull.figures
    notice = f" {pull.notice.message}" if pull.notice else ""
    words = f"Downloading {pull.name}: {line}. It goes on when this page is closed.{notice}"
    return markup.progress(words, done / total if total else None)


def _cards(entries: Sequence[ModelEntry], chosen: str, loaded: str) -> str:
    cards = "".join(_card(entry, markup.BADGE if entry.name == loaded else "") for entry in entries)
    return f'<ul class="df-cards" data-chosen="{markup.word(chosen)}">{cards}</ul>'


def _card(entry: ModelEntry, badge: str) -> str:
    name, state = markup.word(entry.name), STATES.get(entry.state, entry.state)
    size = f"{entry.size} to download" if entry.size and not entry.here else entry.size
    facts = {"size": size, "speed here": _speed(entry), "this machine": entry.fits, "licence": entry.licence}
    lines = "".join(f"<dt>{label}</dt><dd>{markup.word(text)}</dd>" for label, text in facts.items() if text)
    good_at = f"<p>{markup.word(entry.good_at)}</p>" if entry.good_at else ""
    return (
        f'<li data-name="{name}"><button type="button" aria-pressed="false">{name}</button>'
        f'<span class="df-state"><span>{markup.word(state)}</span>{badge}</span>{good_at}<dl>{lines}</dl></li>'
    )


def _speed(entry: ModelEntry) -> str:
    """Write the predicted speed without drafts and with them; empty where none is predicted."""
    if entry.plain is None:
        return ""
    drafted = f", {speed_range(entry.drafted)} drafted" if entry.drafted else ""
    return f"about {rate(entry.plain)} tok/s plain{drafted}"
