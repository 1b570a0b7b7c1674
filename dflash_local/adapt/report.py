"""What an adaptation came to, as a report."""

from __future__ import annotations

from dflash_local.adapt.run import Learnt, rate
from dflash_local.bench.report import Found, opening, table
from dflash_local.catalog.bundled import Pair


def presented(pair: Pair, learnt: Learnt, source: str) -> Found:
    """Write acceptance and speed before and after, by kind of text, the curve, and what was kept."""
    facts, refusal = learnt
    before, after, texts = facts["before"], facts["after"], facts["texts"]
    rows = []
    for kind in sorted(before["kinds"].keys() & after["kinds"].keys()):
        rows.append([kind, *_change(*(rate([side["kinds"][kind]]) for side in (before, after)))])
    rows.append(["total", *_change(before["all"], after["all"])])
    curve = ", ".join(f"{point['held_out']:.2f} ({point['minutes']:.1f} min)" for point in facts["curve"])
    speed = f"{before['tokens_per_s']:.0f} tok/s before, {after['tokens_per_s']:.0f} after"
    lines = [
        f"learnt from {texts['learn']:,} tokens of replies of {pair.label}; {texts['held']:,} held out ({source})",
        *table(("held-out tokens a cycle", "before", "after", "ratio"), rows),
        f"while it learnt: {curve}",
        f"{speed}, in the held-out replies",
        f"nothing is kept: {refusal}" if refusal else f"kept: {pair.name} is loaded with it from now on",
    ]
    report = {**opening("adapt", pair.name, pair.toy), "source": source, **facts, "refusal": refusal or None}
    return report, lines


def _change(before: float, after: float) -> tuple[str, str, str]:
    return f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}x"
