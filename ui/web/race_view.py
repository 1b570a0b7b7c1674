"""A race as HTML: the lanes while they are measured, and the whole of it, which the browser replays by itself."""

from __future__ import annotations

import html
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from dflash_local.events import Mode
from dflash_local.service.race import MODES, NAMES, Lane, Race
from dflash_local.ui.code_runs import CodeRun, code_runs
from dflash_local.ui.race_run import IN_VIEW, LEGEND, MARKS_LEGEND, PACES, Track
from dflash_local.ui.web import markup

SHOWN_CHARS = 20_000  # of a lane that is measured: its end is what is read while it runs
# All of both texts is laid out from the start and made visible block by block: so equal lines are level where both
# panes are scrolled alike, and a frame costs the blocks that came. Figures are written by the server.
REPLAY = """
const still = matchMedia('(prefers-reduced-motion: reduce)');
let race = null, lanes = [], pace = 1, at = 0, looked = 0, asked = 0;
const read = (lane) => ({
  lane, said: lane.querySelector('.df-said'), bar: lane.querySelector('.df-track > div'),
  count: lane.querySelector('.df-count'), blocks: [...lane.querySelectorAll('.df-block')], shown: 0,
  whole: +lane.dataset.seconds, line: lane.dataset.line,
});
const over = (one) => one.shown === one.blocks.length && at >= one.whole;
const draw = (one) => {
  while (one.shown < one.blocks.length && +one.blocks[one.shown].dataset.t <= at)
    one.blocks[one.shown++].classList.add('df-on');
  const last = one.blocks[one.shown - 1];
  one.bar.style.width = `${over(one) ? 100 : last ? last.dataset.share : 0}%`;
  one.count.textContent = over(one) ? one.line
    : `${last ? '▶' : '○'} ${at.toFixed(at < 10 ? 2 : 1)} s${last ? ` · ${last.dataset.said}` : ''}`;
};
const bottom = (one) => {
  const last = one.blocks[one.shown - 1]?.lastElementChild;
  return last ? last.offsetTop + last.offsetHeight : 0;
};
const level = () => {
  const ends = lanes.map(bottom), height = lanes[0].said.clientHeight;
  const row = parseFloat(getComputedStyle(lanes[0].said.firstElementChild).lineHeight);
  const top = Math.max(0, Math.min(Math.max(...ends) - height + row, Math.min(...ends) - IN_VIEW * row));
  for (const one of lanes) one.said.scrollTop = top;
};
const step = (now) => {
  at += (now - looked) / 1000 * pace;
  looked = now;
  lanes.forEach(draw);
  level();
  const ended = lanes.every(over);
  race.classList.toggle('df-ended', ended);
  asked = ended ? 0 : requestAnimationFrame(step);
};
const begin = (from) => {
  cancelAnimationFrame(asked);
  for (const one of lanes) {
    one.shown = 0;
    if (!from) one.blocks.forEach((block) => block.classList.remove('df-on'));
  }
  race.classList.toggle('df-still', from > 0);
  at = from;
  looked = performance.now();
  step(looked);
};
const choose = () => race.querySelectorAll('[data-pace]').forEach(
  (button) => button.setAttribute('aria-pressed', +button.dataset.pace === pace));
element.addEventListener('click', (event) => {
  const button = event.target.closest('button');
  if (!button || !race) return;
  if (button.dataset.pace) pace = +button.dataset.pace;
  else begin(button.dataset.from === 'end' ? Infinity : 0);
  choose();
});
element.addEventListener('scroll', (event) => {
  if (race?.classList.contains('df-ended') && event.target.classList?.contains('df-said'))
    for (const one of lanes) one.said.scrollTop = event.target.scrollTop;
}, true);
const look = () => {
  const found = element.querySelector('.df-race');
  if (found === race) return;
  cancelAnimationFrame(asked);
  race = found;
  if (!race) return;
  lanes = [...race.querySelectorAll('.df-lane')].map(read);
  choose();
  begin(still.matches ? Infinity : 0);
};
new MutationObserver(look).observe(element, {childList: true, subtree: true});
look();
""".replace("IN_VIEW", str(IN_VIEW))


def measured(tracks: Mapping[Mode, Track], running: Mode | None = None) -> str:
    """Draw both lanes as far as they are; the one that runs is not a show yet, so it is dimmed."""
    return f'<div class="df-lanes">{"".join(_measured(mode, tracks[mode], mode == running) for mode in MODES)}</div>'


def _measured(mode: Mode, track: Track, running: bool) -> str:
    return (
        f'<section class="df-lane df-measured{" df-running" if running else ""}"><h3>{NAMES[mode]}</h3>'
        f'<div class="df-track"></div><p class="df-count">{track.line}</p>'
        f'<div class="df-said" tabindex="0"><div>{html.escape(track.text[-SHOWN_CHARS:])}</div></div></section>'
    )


def replayed(race: Race, links: Sequence[str]) -> str:
    """Draw the whole race, which ``REPLAY`` shows as it went; ``links`` save it."""
    lanes = "".join(_lane(lane, lane.mode == race.winner, marked=not race.in_server) for lane in (race.ar, race.dflash))
    choices = {f'data-pace="{pace:g}"': name for pace, name in PACES.items()}
    choices |= {'data-from="top"': "replay", 'data-from="end"': "to the end"}
    presses = "".join(f'<button type="button" {what}>{name.capitalize()}</button>' for what, name in choices.items())
    legend = f'<span class="df-legend">{LEGEND if race.in_server else MARKS_LEGEND}</span>'
    buttons = f'<div class="df-paces" role="group" aria-label="Replay">{presses}{legend}</div>'
    return f'<div class="df-race"><div class="df-lanes">{lanes}</div>{buttons}{_result(race, links)}</div>'


def _lane(lane: Lane, won: bool, marked: bool) -> str:
    drafted = lane.mode == "dflash"
    track = Track()
    blocks: list[str] = []
    whole = Track.of(lane).text
    runs, length = list(code_runs(whole)), max(1, len(whole))
    for event in lane.events:
        known, begin = len(track.blocks), len(track.text)
        track.take(event)
        for block in track.blocks[known:]:
            words = ""
            for piece in block.pieces:
                tag = "u" if drafted and marked and piece.origin == "bonus" else "span"
                words += "".join(_words(piece.text, begin, runs, tag))
                begin += len(piece.text)
            plus = f' data-plus="+{block.tokens}"' if drafted and block.tokens else ""
            share = 100 * begin / length
            blocks.append(
                f'<span class="df-block" data-t="{block.t_s:.4f}" data-share="{share:.1f}" data-said="{track.counts}">'
                f"{words}<i{plus}></i></span>"
            )
    return (
        f'<section class="df-lane{" df-won" if won else ""}{" df-drafted" if drafted else ""}" '
        f'data-seconds="{lane.seconds:.4f}" data-line="{track.line}"><h3>{NAMES[lane.mode]}</h3>'
        '<div class="df-track"><div></div></div><p class="df-count"></p>'
        f'<div class="df-said" tabindex="0"><div>{"".join(blocks)}</div></div></section>'
    )


def _words(text: str, begin: int, runs: Sequence[CodeRun], tag: str) -> Iterator[str]:
    """Cut text that begins at a character of the whole where the kind of its code changes."""
    at = begin
    while at < begin + len(text):
        place = bisect_right(runs, at, key=lambda run: run.end)
        run = runs[place] if place < len(runs) else None
        inside = run is not None and run.start <= at
        end = begin + len(text) if run is None else min(begin + len(text), run.end if inside else run.start)
        kind = f' class="df-code df-{run.kind}"' if run is not None and inside else ""
        yield f"<{tag}{kind}>{html.escape(text[at - begin : end - begin])}</{tag}>"
        at = end


def _result(race: Race, links: Sequence[str]) -> str:
    """Show the winner's figure, those of both, the verdict, and what saves them."""
    ratio, under = race.headline
    table = markup.table(("", *(NAMES[mode] for mode in MODES), "ratio"), race.rows)
    same = "yes" if race.first_difference is None else "no"
    kind = f'class="df-verdict df-same-{same}"'
    said, verdict = f"<span>{markup.word(under)}</span>", f"<p {kind}>{markup.word(race.verdict)}</p>"
    if race.verdict in under:  # it is said once
        said, verdict = f"<span {kind}>{markup.word(under)}</span>", ""
    return (
        f'<div class="df-result"><div><p class="df-headline"><b>{ratio}</b> {said}</p>{verdict}'
        f"<p>{markup.word(f'{race.ratios} · seed {race.seed}')}</p><p>{' · '.join(links)}</p></div>{table}</div>"
    )
