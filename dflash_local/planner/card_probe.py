"""How fast a card reads, decodes and launches: measured on it once, recorded for two, else taken from data sheets.

A prediction for a card scales the one table of launches (``planner/speed.py``) by these three. Where layers lie on a
second card, it adds the way there and back, which is measured with the first of the two.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_local import child_process
from dflash_local.json_text import parse_json
from dflash_local.planner.cards import (
    file_stem,
    find_bandwidth,
    find_clock_rate,
    find_matrix_rate,
    has_peers,
    same_card,
)
from dflash_local.store.kept import keep, read_kept

RECORDED = "card_probes.json"
FREE_SHARE = 0.75  # of the card's memory, at least: where less is free another program may keep it busy
RECORDED_PAIR = "NVIDIA H200"  # the way between two of it stands for one that was not measured
TIMEOUT_S = 120.0  # most of it is loading torch and compiling a kernel


@dataclass(frozen=True, slots=True)
class LinkProbe:
    """Holds microseconds that 16 rows of hidden states take to another card and back, in a recorded graph.

    Attributes:
        other: that card's name. peers_us: by peer copies; None where the driver allows none. host_us: through pinned
            host memory.
    """

    other: str
    peers_us: float | None
    host_us: float


@dataclass(frozen=True, slots=True)
class CardProbe:
    """Holds what ``kernels/card_probe.py`` measures on one card.

    Attributes:
        card: the name that its driver gives. read_gb_s: a sum over memory. product_us: a few-row product that decodes
            int4 out of the cache. launch_us: the smallest kernel in a graph. link: to a second card; None where the
            card was measured alone.
    """

    card: str
    read_gb_s: float
    product_us: float
    launch_us: float
    link: LinkProbe | None = None

    @classmethod
    def of(cls, entry: Any) -> CardProbe:
        """Make it of its JSON form. TypeError, AttributeError: it is not one."""
        link = entry.get("link")
        return cls(**{**entry, "link": None if link is None else LinkProbe(**link)})

    def link_to(self, other: str) -> LinkProbe | None:
        """Return the way to a card of that name; None where another one's was measured, or none."""
        return self.link if self.link is not None and self.link.other == other else None


@dataclass(frozen=True, slots=True)
class Scale:
    """Says how many times as long a card takes to read a byte, to decode and multiply one, to launch a kernel, and to
    multiply large matrices in bfloat16.
    """

    bytes: float
    work: float
    launch: float
    matrix: float

    def of(self, per_megabyte: float, read: float) -> float:
        """Scale the microseconds of a megabyte on the other card, where reading alone takes ``read``."""
        return max(per_megabyte * self.work, min(per_megabyte, read) * self.bytes)


SAME = Scale(1.0, 1.0, 1.0, 1.0)


def read(folder: Path | None, card: str) -> CardProbe | None:
    """Read the kept probe of a card; None where there is none, or the file is not as it should be."""
    return read_kept(None if folder is None else _file(folder, card), lambda entry: _checked(entry, card))


def take(folder: Path | None, device: str, card: str, second: str = "") -> CardProbe | None:
    """Measure a card in a process of its own, for this one need not load torch, and keep what was found.

    Args:
        device: as torch names it, such as cuda:0. second: the GPU to which the way is measured; none if empty.

    Returns:
        None where torch or a compiler is missing, or the card is busy or full.
    """
    command = child_process.python_command("dflash_local.kernels.card_probe", [device, *filter(None, [second])])
    try:
        done = child_process.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        found = _checked(parse_json(done.stdout), card)
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, AttributeError):
        return None
    if found is not None and folder is not None:
        keep(_file(folder, card), json.dumps(asdict(found)) + "\n")
    return found


def _file(folder: Path, card: str) -> Path:
    return folder / f"{file_stem(card)}-probe.json"


def _checked(entry: Any, card: str) -> CardProbe | None:
    found = CardProbe.of(entry)
    figures = [found.read_gb_s, found.product_us, found.launch_us]
    if found.link is not None:
        figures += [found.link.host_us, *([] if found.link.peers_us is None else [found.link.peers_us])]
    right = found.card == card and all(isinstance(each, (int, float)) and 0 < each < 1e6 for each in figures)
    return found if right else None


def scale_of(card: str, other: str, probe: CardProbe | None) -> tuple[Scale, str] | None:
    """Compare a card with another one that is recorded, and tell how that is known; None of an unknown card.

    Args:
        probe: of the very card. Without it, the recorded one of such a card is taken, else the makers' data sheets.
    """
    reference = recorded_probe(other)
    own = probe or recorded_probe(card)
    matrix, other_matrix = find_matrix_rate(card), find_matrix_rate(other)
    if own is not None and reference is not None:
        scale = Scale(
            bytes=reference.read_gb_s / own.read_gb_s,
            work=own.product_us / reference.product_us,
            launch=own.launch_us / reference.launch_us,
            matrix=other_matrix / matrix if matrix and other_matrix else own.product_us / reference.product_us,
        )
        whose = "this card" if probe is not None else f"one {own.card}"
        return scale, f"scaled by a probe of {whose}, which reads {own.read_gb_s:,.0f} GB/s"
    bandwidth, other_bandwidth = find_bandwidth(card), find_bandwidth(other)
    rate, other_rate = find_clock_rate(card), find_clock_rate(other)
    if not (bandwidth and other_bandwidth and rate and other_rate and matrix and other_matrix):
        return None
    words = f"scaled by data sheets, {bandwidth:,.0f} of {other_bandwidth:,.0f} GB/s; never measured on such a card"
    return Scale(other_bandwidth / bandwidth, other_rate / rate, 1.0, other_matrix / matrix), words


def crossing_us(card: str, second: str, probe: CardProbe | None) -> tuple[float, str]:
    """Return the microseconds from one card to a second one and back, and tell how they are known.

    Args:
        probe: of the first card. Where it has no such link, that between two ``RECORDED_PAIR`` stands for it.
    """
    link = None if probe is None else probe.link_to(second)
    whose, peers = "measured here", True
    if link is None:
        recorded = recorded_probe(RECORDED_PAIR)
        assert recorded is not None and recorded.link is not None
        link, whose = recorded.link, f"as between two {RECORDED_PAIR}"
        peers = same_card(card, second) and has_peers(card)
    if peers and link.peers_us is not None:
        us, way = link.peers_us, "by peer copies"
    else:
        us, way = link.host_us, "through host memory"
    return us, f"{us:.0f} us to the other card and back {way}, {whose}"


@cache
def recorded_probes() -> tuple[CardProbe, ...]:
    """Read those that come with the program."""
    from importlib import resources  # `dflash --help` loads this module and must stay quick

    text = resources.files(__package__).joinpath(RECORDED).read_text(encoding="utf-8")
    return tuple(CardProbe.of(entry) for entry in parse_json(text))


def recorded_probe(card: str) -> CardProbe | None:
    return next((probe for probe in recorded_probes() if same_card(probe.card, card)), None)
