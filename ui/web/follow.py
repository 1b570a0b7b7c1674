"""Keeps the end of a growing conversation in view until the reader scrolls away from it, and offers the way back.

Gradio's own following scrolls to the end a moment after each change, wherever the reader is by then.
"""

from __future__ import annotations

import gradio as gr

# The reader lets go by scrolling up, or by opening thoughts to read; the end is held again where the reader comes
# to it, asks for it or sends a message. Whether the reader moved is seen by the place, not by the event: the events
# of scrolling come after the change that would take the reader away.
FOLLOW = """
const NEAR = 40;
const area = element.closest('.column'), button = element.querySelector('button');
let following = true, place = 0, height = 0, asked = 0;
const scroller = () => area.querySelector('.df-talk [role=log]');  // it comes later, and may come anew
const left = (log) => log.scrollHeight - log.clientHeight - log.scrollTop;
const look = (log) => {
  if (log.scrollTop < place - 1 && log.scrollHeight >= height && left(log) > 2) following = false;
  else if (log.scrollTop > place && left(log) < NEAR) following = true;
  place = log.scrollTop;
  height = log.scrollHeight;
  button.hidden = following || left(log) < NEAR;
};
const follow = () => {
  const log = scroller();
  if (!log) return;
  const messages = log.querySelectorAll('[data-testid=user]').length;
  if (messages > asked) following = true;
  else look(log);
  asked = messages;
  if (following && messages) log.scrollTop = log.scrollHeight;  // an empty one is read from its beginning
  look(log);
};
area.addEventListener('scroll', (event) => event.target === scroller() && look(event.target), true);
area.addEventListener('wheel', (event) => {
  const log = scroller();
  if (log && event.deltaY < 0 && log.contains(event.target) && log.scrollTop > 0) following = false;
}, {passive: true});
area.addEventListener('click', (event) => {
  if (event.target.closest('.thought-group, #df-earlier')) following = false;
});
const hold = () => {
  following = true;
  follow();
};
button.addEventListener('click', hold);
area.addEventListener('df-sent', hold);  // a long conversation shows its last messages: their number stays
button.addEventListener('wheel', (event) => {  // it came under the pointer that scrolls
  event.preventDefault();
  scroller().scrollTop += event.deltaY;
}, {passive: false});
let due = false;  // once a frame: each look has the browser lay the conversation out
const soon = () => {
  if (!due) requestAnimationFrame(() => { due = false; follow(); });
  due = true;
};
new MutationObserver(soon).observe(area, {childList: true, subtree: true, characterData: true});
window.addEventListener('resize', follow);
follow();
"""
BUTTON = '<button type="button" hidden>Jump to the latest</button>'


def build() -> None:
    """Add it below the conversation, which is the component of class ``df-talk`` without Gradio's following."""
    gr.HTML(BUTTON, js_on_load=FOLLOW, apply_default_css=False, elem_classes="df-latest")
