"""The field that messages are typed in, and Send and Stop beside it.

The server never writes to the field: it says what became of a message, and the script here takes away what was sent or
brings a message back. What was typed meanwhile stays.
"""

from __future__ import annotations

import html
import itertools
import json
from typing import Literal

import gradio as gr

# A message that is on its way to the server is not sent a second time by a second Enter.
SCRIPT = """
const row = element.closest('.column').querySelector('.df-composer'), TWICE_MS = 2000, KEY = 'df-draft';
const area = () => row.querySelector('#df-field textarea');
const put = (text) => {
  area().value = text;
  area().dispatchEvent(new Event('input', {bubbles: true}));
};
const joined = (...parts) => parts.filter((part) => part.trim()).join('\\n');
let draft = null, sent = null, since = 0;  // draft: what stood in the field before a message was edited
const ACTS = {
  kept: () => {},
  sent: (text, typed) => {
    put(joined(typed.startsWith(text) ? typed.slice(text.length) : typed, draft ?? ''));
    draft = null;
    if (text) row.dispatchEvent(new Event('df-sent', {bubbles: true}));
  },
  back: (text, typed) => put(joined(text, typed)),
  edit: (text, typed) => {
    draft ??= typed;
    put(text);
  },
  leave: () => {
    put(draft ?? '');
    draft = null;
  },
};
const look = () => {
  const mark = element.querySelector('[data-act]');
  if (!mark) return;
  sent = null;
  ACTS[mark.dataset.act](JSON.parse(mark.dataset.text), area().value);
};
const once = (event) => {
  if (sent === area().value && performance.now() - since < TWICE_MS) {
    event.preventDefault();
    event.stopImmediatePropagation();
  } else [sent, since] = [area().value, performance.now()];
};
row.addEventListener('keydown', (event) => {
  if (event.target === area() && event.key === 'Enter' && !event.shiftKey && !event.isComposing) once(event);
}, true);
row.addEventListener('click', (event) => {
  if (event.target.closest('#df-send')) once(event);
}, true);
watch('value', look);
// Of the tab, as its chat: a page that is loaded anew, by hand or after its server, has it again.
row.addEventListener('input', () => sessionStorage.setItem(KEY, area().value));
const restore = () => {
  if (!area()) requestAnimationFrame(restore);
  else if (!area().value && sessionStorage.getItem(KEY)) put(sessionStorage.getItem(KEY));
};
restore();
"""
Act = Literal["kept", "sent", "back", "edit", "leave"]
_numbers = itertools.count(1)


def mark(act: Act, text: str = "", note: str = "") -> str:
    """Write what became of a message, for ``MessageField.mark``.

    Args:
        act: ``kept`` leaves the field as it is; ``sent`` takes the text out of it; ``back`` brings the text back,
            before what was typed since; ``edit`` puts the text there instead, until ``leave`` or ``sent`` brings back
            what was there.
        note: HTML that is shown below the field until the next mark.
    """
    return f'<i data-act="{act}" data-number="{next(_numbers)}" data-text="{html.escape(json.dumps(text))}"></i>{note}'


class MessageField:
    """Holds the components.

    Attributes:
        mark: takes what ``mark`` writes.
    """

    def __init__(self) -> None:
        with gr.Row(elem_classes="df-composer"):
            self.field = gr.Textbox(
                show_label=False,
                container=False,
                placeholder="Message; Enter sends, Shift+Enter begins a line",
                lines=1,
                max_lines=10,
                scale=8,
                min_width=200,
                autofocus=True,
                elem_id="df-field",
            )
            self.send = gr.Button("Send", variant="primary", scale=1, min_width=80, elem_id="df-send")
            self.stop = gr.Button("Stop", scale=1, min_width=80, interactive=False)
        self.mark = gr.HTML(js_on_load=SCRIPT, apply_default_css=False, elem_classes=["df-plain", "df-maybe"])
