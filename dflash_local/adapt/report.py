"""What an adaptation came to, as a report."""

from __future__ import annotations

from dflash_local.adapt.run import Learnt
from dflash_local.bench.report import Found, opening, table
from dflash_local.catalog.bundled import Pair


def presented(pair: Pair, learnt: Learnt, source: str) -> Found:
    """Write acceptance and speed before and after, by kind of text, the curve, and what was kept."""
    (facts, refusal), texts = learnt, learnt.facts["texts"]
    rows = [_row(kind, **each) for kind, each in [*facts["kinds"].items(), ("total", facts["total"])]]
    curve = ", ".join(f"{point['held_out']:.2f} ({point['minutes']:.1f} min)" for point in facts["curve"])
    speed = "{:.0f} tok/s before, {:.0f} after".format(*facts["tokens_per_s"])
    lines = [
        f"learnt from {texts['learn']:,} tokens of replies of {pair.label}; {texts['held']:,} held out ({source})",
        *table(("held-out tokens a cycle", "before", "after", "ratio", "error"), rows),
        f"while it learnt: {curve}",
        f"{speed}, in the held-out replies",
        f"nothing is kept: {refusal}" if refusal else f"kept: {pair.name} is loaded with it from now on",
    ]
    report = {**opening("adapt", pair.name, pair.toy), "source": source, **facts, "refusal": refusal or None}
    return report, lines


def _row(kind: str, before: float, after: float, ratio: float, error: float | None) -> tuple[str, ...]:
    return kind, f"{before:.2f}", f"{after:.2f}", f"{ratio:.2f}x", "-" if error is None else f"{error:.2f}"
