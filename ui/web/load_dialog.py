"""The load dialog of the Models tab: the ways to load the chosen pair, one of them picked, and the button that does it.

A window sends back the number of the table that it shows, an index into it and flags; no name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import gradio as gr
from gradio.events import Dependency

from dflash_local.app.load_choices import LoadChoice, LoadChoices
from dflash_local.errors import DFlashError, UsageError
from dflash_local.tables import gib, tokens
from dflash_local.ui.choice_text import COLUMNS, basis, choice_row
from dflash_local.ui.plan_text import ledger_lines, machine_line
from dflash_local.ui.verdict_text import verdict, verdict_of_way
from dflash_local.ui.web import markup
from dflash_local.ui.web.models_view import ModelsView
from dflash_local.ui.web.visitors import Visitor, Visitors

# What belongs to the picked row is shown at once, without waiting for the server. A table that was made anew keeps
# what was picked by hand in the one before it, and the keyboard's place.
SCRIPT = """
let pair = '', picked = '', focused = '', unfolded = window.innerWidth > 640;
const all = (what) => [...element.querySelectorAll(what)];
const root = () => element.querySelector('.df-plans');
const show = () => {
  const on = element.querySelector('input[type=radio]:checked');
  all('tr[data-key]').forEach((row) => row.classList.toggle('df-chosen', !!on && row.contains(on)));
  all('section[data-way]').forEach((part) => { part.hidden = !on || part.dataset.way !== on.value; });
};
const adopt = () => {
  const plans = root();
  if (!plans) return;
  if (plans.dataset.pair !== pair) picked = '';
  pair = plans.dataset.pair;
  const same = all('tr[data-key]').find((row) => row.dataset.key === picked)?.querySelector('input:enabled');
  if (same) same.checked = true;
  const unfit = element.querySelector('.df-unfit');
  if (unfit) unfit.open = unfolded || !element.querySelector('tr[data-key]');
  show();
  if (focused && document.activeElement === document.body) {
    const wanted = focused === 'df-way' ? 'input[type=radio]:checked' : `[name=${focused}]:enabled`;
    element.querySelector(wanted)?.focus({preventScroll: true});
  }
};
const pick = (radio) => {
  radio.checked = true;
  picked = radio.closest('tr').dataset.key;
  show();
};
const replan = () => {
  const context = element.querySelector('[name=df-context]'), draft = element.querySelector('[name=df-draft]');
  root().setAttribute('aria-busy', 'true');
  element.querySelector('.df-planning').hidden = false;
  all('.df-start').forEach((button) => { button.disabled = true; });
  trigger('select', {
    plan: +root().dataset.plan, context: context ? +context.value : 0, draft: draft ? draft.checked : true,
  });
};
document.addEventListener('focusin', (event) => { focused = element.contains(event.target) ? event.target.name : ''; });
element.addEventListener('change', (event) => event.target.type === 'radio' ? pick(event.target) : replan());
element.addEventListener('click', (event) => {
  if (event.target.closest('.df-unfit > summary')) unfolded = !element.querySelector('.df-unfit').open;
  const radio = event.target.closest('tr[data-key]')?.querySelector('input:enabled');
  if (radio && radio !== event.target) {
    pick(radio);
    radio.focus({preventScroll: true});
  }
  if (!event.target.closest('.df-start')) return;
  const on = element.querySelector('input[type=radio]:checked');
  trigger('submit', {plan: +root().dataset.plan, way: on ? +on.value : -1});
});
watch('value', adopt);
adopt();
"""
TITLES = tuple(column.title for column in COLUMNS)
MEMORY_COLUMNS = 76
STALE = "the plans have changed since: look at them again"


class Asked(NamedTuple):
    """Is what a window wants planned; ``number`` is that of its table."""

    number: int
    name: str
    context: int | None = None
    draft: bool = True


class Planned(NamedTuple):
    """Is what a window was shown; ``found`` is None where the pair's shape is not known before it is here."""

    asked: Asked
    found: LoadChoices | None

    @property
    def contexts(self) -> tuple[int | None, ...]:
        """Lists what may be asked for: None, the most that fits, comes first."""
        lengths = set(self.found.contexts if self.found is not None else ())
        return (None, *sorted(lengths | ({self.asked.context} if self.asked.context else set())))


class LoadDialog:
    """Is the component and what it does. Each window has its own."""

    def __init__(self, models_view: ModelsView, visitors: Visitors) -> None:
        self._models, self._served, self._visitors = models_view, models_view.served, visitors
        self._numbers = itertools.count(1)
        self.panel = gr.HTML(
            js_on_load=SCRIPT, apply_default_css=False, elem_id="df-load-dialog", elem_classes="df-maybe"
        )

    def connect(self, drawn: Sequence[Dependency], notice: gr.HTML, quiet: dict[str, Any]) -> None:
        """Who calls what.

        Args:
            drawn: events after which a pair's ways are planned anew. notice: takes what went wrong at the start.
        """
        each: dict[str, Any] = {**quiet, "trigger_mode": "multiple"}  # none is left out while another runs
        # Answers of one queue of its own reach a window in their order. Nothing else writes to the panel: what another
        # queue sent before could come after it.
        alone: dict[str, Any] = {"concurrency_id": "df-plans", "concurrency_limit": 1}
        asked = self.panel.select(self.ask_otherwise, None, None, **each)
        for event in (*drawn, asked):
            event.then(self.plan, None, self.panel, **each, **alone)
        self.panel.submit(self.start, None, notice, **quiet)

    def ask(self, name: str, request: gr.Request) -> None:
        """Have a pair's ways to load planned, by the event that follows."""
        visitor, number = self._visitors.of(request), next(self._numbers)
        if visitor.asked is None or visitor.asked.name != name:
            visitor.asked = Asked(number, name)
        elif self._served.service.status.state != "loading":  # memory is about to change, then it is planned
            visitor.asked = visitor.asked._replace(number=number)

    def ask_otherwise(self, event: gr.EventData, request: gr.Request) -> None:
        """Have them planned with another context, or with or without the drafter."""
        visitor, context = self._visitors.of(request), _integer(event, "context")
        planned = _shown(visitor, event)
        if planned is None or not 0 <= context < len(planned.contexts):
            return
        draft = getattr(event, "draft", True) is not False
        visitor.asked = Asked(next(self._numbers), planned.asked.name, planned.contexts[context], draft)

    def plan(self, request: gr.Request) -> Iterator[Any]:
        """The table, and before that of another pair a word of what goes on.

        Nothing new where another request has drawn it, or where more was asked for meanwhile.
        """
        visitor = self._visitors.of(request)
        asked, before = visitor.asked, visitor.planned
        if asked is None or (before is not None and before.asked.number == asked.number):
            yield gr.skip()  # a generator without a yield would empty the panel
            return
        if not asked.name or self._served.decided:
            yield markup.paragraph(self._served.decided)
            return
        if before is None or before.asked.name != asked.name:
            yield markup.progress(f"Planning how to load {asked.name}", None)
        try:
            planned = Planned(asked, self._served.load_choices(asked.name, asked.context, asked.draft))
            drawn = self._drawn(planned)
        except DFlashError as error:
            planned, drawn = Planned(Asked(asked.number, asked.name), None), markup.failed(error)
        if visitor.asked == asked:
            visitor.asked, visitor.planned, visitor.planned_before = planned.asked, planned, before
            yield drawn

    def start(self, event: gr.EventData, request: gr.Request) -> str:
        """Load the pair in the way that was picked, or begin its download; what went wrong."""
        planned, way = _shown(self._visitors.of(request), event), _integer(event, "way")
        try:
            if planned is None:
                raise UsageError(STALE)
            if planned.found is None:
                self._models.start_by_name(planned.asked.name)
            elif not 0 <= way < len(planned.found.choices) or not planned.found.choices[way].fits:
                raise UsageError(STALE)
            else:
                self._models.start(planned.found.choices[way])
        except DFlashError as error:
            return markup.failed(error)
        return ""

    def _drawn(self, planned: Planned) -> str:
        asked, found = planned
        busy = self._models.pulling
        opening = f'<div class="df-plans" data-plan="{asked.number}" data-pair="{markup.word(asked.name)}">'
        if found is None:
            known = self._served.details(asked.name, asked.context, asked.draft)
            opening += _verdict(*verdict(asked.name, known.plans, known.status.row.why_not_here))
            here = self._served.entry(asked.name).here
            text = "How it can be loaded is known once its configuration is here."
            action = _button("Load" if here else "Download", busy and not here)
            return f"{opening}{markup.paragraph('' if here else text)}{action}</div>"
        opening += _verdict(*verdict_of_way(found, found.leading))
        fitting = [(index, each) for index, each in enumerate(found.choices) if each.fits]
        title = f"{asked.name} on {machine_line(found.machine)}"
        table = "".join(self._row(index, each, index == found.preselected) for index, each in fitting)
        footnote, ways = basis(found), "".join(self._way(index, each, busy) for index, each in fitting)
        return (
            f'{opening}{_options(planned)}<div class="df-ways" role="radiogroup"'
            f' aria-label="Ways to load {markup.word(asked.name)}">{_table(title, table, found)}{_unfit(found)}</div>'
            f'{f"""<p class="df-line df-basis">{markup.word(footnote)}</p>""" if footnote else ""}{ways}</div>'
        )

    def _row(self, index: int, choice: LoadChoice, picked: bool) -> str:
        cells = choice_row(choice).cells
        titled = list(zip(TITLES, cells, strict=True))[1:]
        words = ", ".join([cells[0], *(f"{title} {cell}" for title, cell in titled)])
        radio = (
            f'<label><input type="radio" name="df-way" value="{index}" aria-label="{markup.word(words)}"'
            f"{' checked' if picked else ''}><span>{markup.word(cells[0])}</span></label>"
        )
        loaded = f" {markup.BADGE}" if self._served.is_loaded(choice) else ""
        others = "".join(f'<td data-title="{title}">{markup.word(cell)}</td>' for title, cell in titled)
        key = markup.word(f"{choice.model} {choice.config.quantize} {choice.config.kv_cache}")
        return f'<tr data-key="{key}"><td>{radio}{loaded}</td>{others}</tr>'

    def _way(self, index: int, choice: LoadChoice, busy: bool) -> str:
        """Tell what is to be known of a way before it is taken, and its button."""
        served = self._served
        lines = [f"{choice_row(choice).remark}: {choice.model}"]
        action = "Load again" if served.is_loaded(choice) else "Load"
        if not choice.here:
            licence, disk = served.before_download(choice.model)
            lines.append(f"licence {licence}{f'; {disk}' if disk else ''}")
            size = "" if choice.download_gib is None else f" {gib(choice.download_gib, choice.computed)}"
            action = f"Download{size} and load"
        text = "".join(map(markup.paragraph, lines))
        return (
            f'<section data-way="{index}" hidden>{text}{_button(action, busy and not choice.here)}'
            f"<details><summary>Every row of its memory</summary>"
            f"{markup.block(chr(10).join(ledger_lines(choice.plan, MEMORY_COLUMNS)))}</details></section>"
        )


def _verdict(head: str, lines: Sequence[tuple[str, str]]) -> str:
    """Open with what the pair comes to here, as ``dflash plan`` does."""
    rows = "".join(f"<dt>{label}</dt><dd>{markup.word(text)}</dd>" for label, text in lines)
    return f'<div class="df-verdict"><h2>{markup.word(head)}</h2><dl>{rows}</dl></div>'


def _table(title: str, rows: str, found: LoadChoices) -> str:
    if not rows:
        return markup.paragraph(f"Nothing of {found.name} fits {machine_line(found.machine)}.", "error")
    titles = "".join(f'<th scope="col">{title}</th>' for title in TITLES)
    head = f"<caption>{markup.word(title)}</caption><thead><tr>{titles}</tr></thead>"
    return f"<table>{head}<tbody>{rows}</tbody></table>"


def _unfit(found: LoadChoices) -> str:
    """List those that do not fit, with the reason: they cannot be picked."""
    rows = [choice_row(each) for each in found.choices if not each.fits]
    if not rows:
        return ""
    lines = "".join(
        f'<tr><td><label><input type="radio" disabled><span>{markup.word(row.cells[0])}</span></label></td>'
        f"<td>{markup.word(row.remark)}</td></tr>"
        for row in rows
    )
    summary = f"{len(rows)} do{'es' * (len(rows) == 1)} not fit"
    head = '<thead><tr><th scope="col">Weights</th><th scope="col">Why it does not fit</th></tr></thead>'
    return (
        f'<details class="df-unfit"><summary>{summary}</summary>'
        f'<table aria-label="What does not fit">{head}<tbody>{lines}</tbody></table></details>'
    )


def _options(planned: Planned) -> str:
    """Show what holds for every way: the drafter, where there is one, and the context, where there is a choice."""
    asked, found = planned
    parts = []
    if found is not None and found.has_drafter:
        checked = " checked" if asked.draft else ""
        parts.append(f'<label><input type="checkbox" name="df-draft"{checked}><span>Drafter</span></label>')
    if len(planned.contexts) > 1:
        options = "".join(
            f'<option value="{index}"{" selected" if length == asked.context else ""}>'
            f"{'the most that fits' if length is None else tokens(length)}</option>"
            for index, length in enumerate(planned.contexts)
        )
        parts.append(
            f'<label><span>Context</span><select name="df-context" aria-label="Context">{options}</select></label>'
        )
    planning = '<span class="df-planning" role="status" hidden>Planning…</span>'
    return f'<div class="df-options">{"".join(parts)}{planning}</div>'


def _button(action: str, busy: bool) -> str:
    wait = ' disabled title="one download at a time"' if busy else ""
    return f'<button type="button" name="df-start" class="df-start"{wait}>{markup.word(action)}</button>'


def _shown(visitor: Visitor, event: gr.EventData) -> Planned | None:
    """Find the table that an event came from; None where it is too old, or another pair was chosen since.

    A table is drawn anew when a download ends: an event of the one before it may be on its way.
    """
    for planned in (visitor.planned, visitor.planned_before):
        if planned is not None and planned.asked.number == _integer(event, "plan"):
            return planned if visitor.asked is not None and visitor.asked.name == planned.asked.name else None
    return None


def _integer(event: gr.EventData, field: str) -> int:
    """Return a number that a window sent; -1 for anything else."""
    value = getattr(event, field, -1)
    return value if type(value) is int and value >= 0 else -1
