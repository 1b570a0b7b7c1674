"""A race as a file that can be shown again: JSON, a page or a terminal recording, all made of one record."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local.report.code_runs import code_runs
from dflash_local.report.race_cast import to_cast
from dflash_local.request import Request, SamplingParams
from dflash_local.service.race import Lane, Race
from dflash_local.service.race_lanes import IN_VIEW, SHARE_IN_VIEW
from dflash_local.terminal import TerminalFilter

if TYPE_CHECKING:
    from dflash_local.catalog.bundled import Pair
    from dflash_local.loaded import SessionFacts

PAGE, HOLE = Path(__file__).with_name("race_page.html"), "{{RACE}}"


@dataclass(frozen=True, slots=True)
class About:
    """What surrounds a race.

    Attributes:
        title: the pair, as people read it. command: repeats the race.
        source: where its figures come from: pair, versions, machine, and ``note`` for a toy.
    """

    title: str
    prompt: str
    command: str
    source: Mapping[str, Any]


def command(pair: str, prompt: str, request: Request, seed: int, options: Sequence[str] = ()) -> str:
    """The command line that runs a race again; a sentence where it lacks an option for that.

    Args:
        seed: that of the race: the request's may be None. options: how the pair is loaded.
    """
    if lacking := _without_option(request):
        return f"dflash race cannot repeat it: it has no option for {', '.join(lacking)}"
    own = ["--seed", str(seed), "--max-new-tokens", str(request.limits.max_new_tokens)]
    if not request.sampling.greedy:
        own += ["--temperature", f"{request.sampling.temperature:g}"]
    if request.block_size is not None:
        own += ["--block-size", str(request.block_size)]
    own.append("--think" if request.thinking else "--no-think")
    end = ["--", prompt] if prompt.startswith("-") else [prompt]
    return shlex.join(["dflash", "race", pair, *own, *options, *end])


def _without_option(request: Request) -> list[str]:
    """What shapes the replies and is no option of ``dflash race``; filters leave a greedy reply as it is."""
    sampling, usual = request.sampling, SamplingParams()
    names = ["repetition_penalty", "presence_penalty", "frequency_penalty"]
    names += [] if sampling.greedy else ["top_k", "top_p", "min_p"]
    found = [f"{name} {getattr(sampling, name):g}" for name in names if getattr(sampling, name) != getattr(usual, name)]
    return [*found, *(["stop strings"] if request.limits.stop else [])]


def load_options(pair: Pair, facts: SessionFacts | None, by_url: bool) -> list[str]:
    """The options that load a pair as it is loaded now; addresses and folders of this machine are left open.

    Args:
        by_url: servers that this program did not start reply.
    """
    if facts is None:
        return []
    own = [] if pair.counted else ["--drafter", "DRAFTER"]
    if by_url:
        return [*own, "--url", "URL", "--plain-url", "URL"]
    return [*own, *(["--engine", facts.engine] if facts.in_server else facts.load.arguments())]


def record(race: Race, about: About) -> dict[str, Any]:
    """All that is known of a race, its events in time included, so that it can be shown again."""
    ratio, under = race.headline
    return {
        **about.source,
        "title": about.title,
        "prompt": about.prompt,
        "command": about.command,
        "verdict": race.verdict,
        "ratios": race.ratios,
        "headline": {"ratio": ratio, "under": under, "winner": race.winner},
        "rows": race.rows,
        "unmeasured": unmeasured(race, about),
        **race.as_dict(),
        "events": {lane.mode: events(lane) for lane in (race.ar, race.dflash)},
    }


def events(lane: Lane) -> list[dict[str, Any]]:
    """The steps of a reply: ``t_s`` from its start, how many tokens came, how many were accepted, and their text."""
    return [
        {
            "t_s": step.t_s,
            "tokens": len(step.token_ids),
            "accepted": step.accepted,
            "pieces": [asdict(piece) for piece in step.pieces],
        }
        for step in lane.steps
    ]


def unmeasured(race: Race, about: About) -> list[str]:
    """What the figures do not tell, in sentences."""
    note = about.source.get("note") or ""
    server = ["Two servers wrote the replies; the way to them is in the times."] if race.in_server else []
    texts = ["The server names no tokens, so texts were compared."] if race.by_text else []
    return [
        *([f"{note[0].upper()}{note[1:]}."] if note else []),
        "This is one run of one prompt: drafts of other prompts are accepted more or less often.",
        "Loading and warming up are not in the times. Memory, energy and other work on the machine were not measured.",
        *server,
        *texts,
    ]


def to_json(race: Race, about: About) -> bytes:
    """The record as it is."""
    return (json.dumps(record(race, about), indent=1, ensure_ascii=True) + "\n").encode("ascii")


def to_html(race: Race, about: About) -> bytes:
    """One page that plays it and asks no other machine for anything; no text of the model can leave its place."""
    shown = record(race, about)
    shown["code"], shown["in_view"] = {}, [IN_VIEW, SHARE_IN_VIEW]
    for mode, steps in shown["events"].items():
        shows, text = TerminalFilter(), ""
        for piece in (piece for step in steps for piece in step["pieces"]):
            piece["text"] = shows.feed(piece["text"])  # a text must not turn the page's direction
            text += piece["text"]
        shown["code"][mode] = [(run.start, run.end, run.kind) for run in code_runs(text)]
    data = json.dumps(shown, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace(HOLE, data).encode("utf-8")


# What --save and the buttons of the screens offer, by the file's suffix.
SAVED: dict[str, Callable[[Race, About], bytes]] = {".html": to_html, ".cast": to_cast, ".json": to_json}
