"""What the browser's tab remembers for the page, and the buttons that the page adds to messages: the scripts' side."""

from __future__ import annotations

import gradio as gr

from dflash_local.ui.web.chat_view import ChatView
from dflash_local.ui.web.markup import word

# Of the tab alone, and for as long as it is there: another tab has a chat of its own.
REMEMBER = """
const KEY = 'df-chat';
const keep = () => {
  const mark = element.querySelector('[data-chat]');
  if (mark) sessionStorage.setItem(KEY, mark.dataset.chat);
};
watch('value', keep);
trigger('click', {chat: sessionStorage.getItem(KEY) || ''});
"""
# Gradio's own way of editing offers the message as it is written for Markdown, not as it was typed.
EDIT = """
const area = element.closest('.column');
const add = () => {
  area.querySelectorAll('.df-talk pre:not([tabindex])').forEach((code) => { code.tabIndex = 0; });  // it scrolls
  area.querySelectorAll('.df-talk .thought-group [role=button] button').forEach((arrow) => {
    arrow.inert = true;  // the title around it opens, and holds no second button
  });
  area.querySelectorAll('.df-talk .examples[role=list]').forEach((part) => {  // of buttons, which are no items
    part.setAttribute('role', 'group');
    part.setAttribute('aria-label', 'Prompts to begin with');
  });
  area.querySelectorAll('.df-talk .user-row:not(:has(> .df-edit))').forEach(addTo);
};
const addTo = (row) => {
  const button = document.createElement('button');
  button.type = 'button';
  button.className = 'df-edit';
  button.textContent = 'Edit';
  button.setAttribute('aria-label', 'Edit this message');
  row.prepend(button);
};
area.addEventListener('click', (event) => {
  const button = event.target.closest('.df-edit');
  if (!button) return;
  const rows = [...area.querySelectorAll('.df-talk .user-row')];
  trigger('click', {back: rows.length - rows.indexOf(button.closest('.user-row'))});
});
new MutationObserver(add).observe(area, {childList: true, subtree: true});
add();
"""


def remembered() -> gr.HTML:
    """Make the component that tells, by a click with ``chat`` when the page is loaded, what ``mark`` was set last."""
    return gr.HTML(js_on_load=REMEMBER, apply_default_css=False, elem_classes="df-unseen")


def mark(chat: ChatView) -> str:
    """Write what the tab is to remember: the chat's key and the name of its file."""
    return f'<i data-chat="{word(chat.key)} {word(chat.name)}"></i>'


def edit_buttons() -> gr.HTML:
    """Add a button to each message of the user's; a click tells how far ``back`` it is, 1 for the last."""
    return gr.HTML(js_on_load=EDIT, apply_default_css=False, elem_classes="df-unseen")
