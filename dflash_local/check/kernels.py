"""What is known of the kernels that a load used: those that failed, and the configuration chosen for each product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dflash_local.bench import provenance
from dflash_local.bench.report import Found
from dflash_local.kernels.kernel_record import KernelRecord
from dflash_local.loaded import SessionFacts


def presented(model: str, facts: SessionFacts, records: Sequence[KernelRecord], seconds: float) -> Found:
    """Return the records of each card, and their lines."""
    cards = [
        {
            **record.facts,
            "tried": record.tried,
            "impossible": record.impossible or None,
            "verdicts": dict(Counter(record.verdicts.values())),
            "failed": {name: verdict for name, verdict in record.verdicts.items() if verdict != "right"},
            "products": {name: record.choices.get(name) for name in sorted(record.used)},
        }
        for record in records
    ]
    report = {
        "model": model,
        "loaded_as": facts.loaded_as,
        "seconds": round(seconds, 2),
        "cards": cards,
        "notices": list(facts.notices),
        "versions": provenance.versions(),
    }
    lines = [f"{model} ({facts.loaded_as}) is ready in {seconds:.1f} s"]
    for card in cards:
        known = ", ".join(f"{count} {verdict}" for verdict, count in card["verdicts"].items()) or "none"
        lines.append(f"  {card['card']}: {card['tried']} kernels tried now; known in all: {known}")
        lines += [f"  {product}: {config or 'another product'}" for product, config in card["products"].items()]
    if not cards:
        lines.append("  it has no products that kernels are tried and chosen for on this device")
    return report, lines
