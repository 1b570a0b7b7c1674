"""Colours and fonts as Gradio's theme takes them; `face.css` names them for the page's own rules."""

from __future__ import annotations

import gradio as gr

FONT = ["system-ui", "sans-serif"]  # fonts of this machine: none is fetched
MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]
THEME = gr.themes.Base(
    primary_hue=gr.themes.colors.teal,
    neutral_hue=gr.themes.colors.slate,
    spacing_size=gr.themes.sizes.spacing_md,
    radius_size=gr.themes.sizes.radius_md,
    font=FONT,
    font_mono=MONO,
).set(
    layout_gap="0.6rem",
    body_text_color_subdued="*neutral_600",
    body_text_color_subdued_dark="*neutral_400",
    input_placeholder_color="*neutral_500",
    input_placeholder_color_dark="*neutral_400",
    error_text_color="#b42318",
    error_text_color_dark="#fca5a5",
    block_border_width="1px",
    block_shadow="none",
    button_primary_background_fill="*primary_700",
    button_primary_background_fill_hover="*primary_800",
    button_primary_background_fill_dark="*primary_700",
    button_primary_text_color="white",
    color_accent="*primary_600",
)
