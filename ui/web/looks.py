"""Colours, fonts and the few rules of layout that Gradio's own do not cover."""

from __future__ import annotations

import gradio as gr

FONT = ["system-ui", "sans-serif"]
MONO = ["ui-monospace", "monospace"]
THEME = gr.themes.Base(font=FONT, font_mono=MONO)  # fonts of this machine: none is fetched
CSS = ""
