"""A race as HTML: the lanes while they are measured, and the saved page of it, which plays in a frame."""

from __future__ import annotations

import html
from collections.abc import Mapping

from dflash_local.events import Mode
from dflash_local.report.race_file import SAVED, About
from dflash_local.service.race import MODES, NAMES, Race
from dflash_local.service.race_lanes import Track
from dflash_local.ui.web import markup

SHOWN_CHARS = 20_000  # of a lane that is measured: its end is what is read while it runs
# What a file cannot know of the page around it: that it is in one, how that looks, and that its height is free.
FRAME = """
const dress = () => {
  const root = element.querySelector('iframe')?.contentDocument?.documentElement;
  if (!root) return;
  root.style.colorScheme = document.body.classList.contains('dark') ? 'dark' : 'light';
  root.style.background = getComputedStyle(element).getPropertyValue('--body-background-fill');
};
new MutationObserver(dress).observe(document.body, {attributeFilter: ['class']});
element.addEventListener('load', (event) => {
  const frame = event.target, root = frame.contentDocument.documentElement;
  root.classList.add('framed');
  new ResizeObserver(() => { frame.style.height = `${root.offsetHeight}px`; }).observe(root);
  dress();
}, true);
"""


def measured(tracks: Mapping[Mode, Track], running: Mode | None = None) -> str:
    """Draw both lanes as far as they are; the one that runs is not a show yet, so it is dimmed."""
    return f'<div class="df-lanes">{"".join(_measured(mode, tracks[mode], mode == running) for mode in MODES)}</div>'


def _measured(mode: Mode, track: Track, running: bool) -> str:
    return (
        f'<section class="df-lane{" df-running" if running else ""}"><h2>{NAMES[mode]}</h2>'
        f'<p class="df-count">{track.line}</p>'
        f'<div class="df-said" tabindex="0"><div>{html.escape(track.text[-SHOWN_CHARS:])}</div></div></section>'
    )


def replayed(race: Race, about: About) -> tuple[str, str]:
    """Put the page that ``--save`` writes into a frame; before it the links that save the race."""
    files = {suffix: write(race, about).decode() for suffix, write in SAVED.items()}
    links = [
        markup.save_link(f"Save as {suffix}", f"race{suffix}", "application/octet-stream", content)
        for suffix, content in files.items()
    ]
    page = html.escape(files[".html"])
    frame = f'<iframe class="df-replay" title="The race, shown again" srcdoc="{page}"></iframe>'
    return f'<p class="df-line">{" · ".join(links)}</p>', frame
