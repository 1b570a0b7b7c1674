"""The list of saved chats beside the conversation: to find one, go on with it, name it, delete it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import gradio as gr

from dflash_local.app.kept_chats import age
from dflash_local.errors import DFlashError
from dflash_local.store import history
from dflash_local.store.history import ChatEntry
from dflash_local.tables import counted
from dflash_local.ui.web import markup
from dflash_local.ui.web.visitors import Visitor, Visitors

MOST = 200  # chats that are listed; the search finds the others
# Open is a click; Rename makes a field of the title; Delete asks once more in its own place.
LIST = """
const tell = (act, button, more) => trigger('click', {act, name: button.closest('li').dataset.name, ...more});
element.addEventListener('click', (event) => {
  const button = event.target.closest('button');
  if (!button) return;
  const act = button.dataset.act;
  if (act === 'delete' && button.dataset.sure !== 'yes') {
    button.dataset.sure = 'yes';
    button.textContent = 'Sure?';
  } else if (act === 'rename') rename(button);
  else tell(act, button);
});
element.addEventListener('focusout', (event) => {
  const button = event.target;
  if (button.dataset && button.dataset.sure === 'yes') {
    button.dataset.sure = '';
    button.textContent = 'Delete';
  }
});
const rename = (button) => {
  const item = button.closest('li'), title = item.querySelector('.df-title');
  const field = document.createElement('input');
  field.value = title.textContent;
  field.maxLength = 80;
  field.setAttribute('aria-label', 'Name of the chat');
  item.prepend(field);
  item.classList.add('df-renaming');
  field.select();
  let ended = false;  // it loses the focus as it goes
  const end = () => {
    if (ended) return;
    ended = true;
    item.classList.remove('df-renaming');
    field.remove();
  };
  field.addEventListener('keydown', (event) => {
    if (event.key === 'Enter') { tell('rename', field, {title: field.value}); end(); }
    if (event.key === 'Escape') { end(); button.focus(); }
  });
  field.addEventListener('blur', end);
};
// The window is called as its chat, so that several are told apart.
const plain = document.title;
const call = () => {
  const title = element.querySelector('[aria-current] .df-title');
  document.title = title ? `${title.textContent} · ${plain}` : plain;
};
watch('value', call);
call();
"""
# Beside the conversation where there is room; over it, when asked for, where there is none.
TOGGLE = """
const button = element.querySelector('button'), split = element.closest('.df-split');
const show = (open) => {
  split.classList.toggle('df-open', open);
  button.setAttribute('aria-expanded', open);
};
button.addEventListener('click', () => {
  show(!split.classList.contains('df-open'));
  localStorage.setItem('df-drawer', split.classList.contains('df-open') ? 'open' : 'closed');
});
show(window.innerWidth > 1000 && localStorage.getItem('df-drawer') !== 'closed');
"""
TOGGLE_BUTTON = '<button type="button" aria-expanded="false" aria-controls="df-drawer">Chats</button>'


def toggle() -> None:
    """Add the button that shows and hides the list."""
    gr.HTML(TOGGLE_BUTTON, js_on_load=TOGGLE, apply_default_css=False, elem_classes="df-toggle")


class Drawer:
    def __init__(self, visitors: Visitors) -> None:
        self._visitors = visitors
        with gr.Column(scale=2, min_width=200, elem_classes="df-drawer", elem_id="df-drawer"):
            self.new = gr.Button("New chat", size="sm", elem_id="df-new")
            self.search = gr.Textbox(
                show_label=False,
                container=False,
                placeholder="Search the chats",
                lines=1,
                max_lines=1,
                elem_id="df-search",
                html_attributes=gr.InputHTMLAttributes(autocomplete="off"),
            )
            self.list = gr.HTML(js_on_load=LIST, apply_default_css=False, elem_id="df-chats")

    def drawn(self, visitor: Visitor) -> str:
        """List the chats that the window looks for."""
        if self._visitors.folder is None:
            return markup.paragraph("Chats are not kept: history is off.")
        try:
            entries = history.entries(self._visitors.folder, visitor.search)
        except DFlashError as error:
            return markup.failed(error)
        if not entries:
            return markup.paragraph("No chat has these words." if visitor.search else "Chats are listed here.")
        return _list(entries, visitor.chat.name)

    def rename(self, name: str, title: str) -> None:
        """Give a chat another title; an empty one changes nothing. DFlashError: it cannot be written."""
        if title.strip():
            history.rename(self._visitors.folder, name, title.strip())

    def delete(self, visitor: Visitor, name: str) -> None:
        """Delete a chat; the window that showed it has a new one. BusyError: another window shows it."""
        self._visitors.release(visitor, name)
        history.delete(self._visitors.folder, name)


def _list(entries: Sequence[ChatEntry], shown: str) -> str:
    items = "".join(_item(entry, entry.name == shown) for entry in entries[:MOST])
    more = markup.paragraph(f"and {len(entries) - MOST:,} more: search for them") if len(entries) > MOST else ""
    return f'<ul class="df-chats">{items}</ul>{more}'


def _item(entry: ChatEntry, shown: bool) -> str:
    name, title = markup.word(entry.name), markup.word(entry.title)
    facts = " · ".join(filter(None, (age(time.time() - entry.modified), entry.model, counted(entry.turns, "message"))))
    current = ' aria-current="true"' if shown else ""
    return (
        f'<li data-name="{name}"><button type="button" data-act="open"{current}>'
        f'<span class="df-title">{title}</span><small>{markup.word(facts)}</small></button>'
        f'<span class="df-acts"><button type="button" data-act="rename" aria-label="Rename {title}">Rename</button>'
        f'<button type="button" data-act="delete" aria-label="Delete {title}">Delete</button></span></li>'
    )
