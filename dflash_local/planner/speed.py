"""How long a step and a cycle of the fused engine take on a card, predicted before anything is downloaded.

A launch takes a constant and the time of its bytes; both were fitted to products, experts and whole passes that were
measured with random weights (``benchmarks/speed_table.py``). A byte takes as long as reading it or as long as decoding
and multiplying it, whichever is longer. For another card each of the two is scaled by itself, and so are the constants:
by the probe of that card, or else by the data sheets (``planner/card_probe.py``). Acceptance lengths are
published ones, or those of other pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from dflash_local.catalog.row import Published, Row, lengths_of
from dflash_local.config.features import ModelConfig
from dflash_local.drafters.drafter import Drafter
from dflash_local.drafters.with_mtp import drafters_of
from dflash_local.errors import SettingsError
from dflash_local.json_text import parse_json
from dflash_local.layout.cycle import prompt_chunk
from dflash_local.layout.linear import UNQUANTIZED
from dflash_local.layout.part_layout import EngineSpec
from dflash_local.layout.prompt_work import prompt_work
from dflash_local.layout.quantized import quantized
from dflash_local.layout.target import front_model
from dflash_local.layout.traffic import PartKind, Traffic, layers_traffic, target_traffic
from dflash_local.planner import cpu_speed
from dflash_local.planner.card_probe import SAME, Scale, crossing_us, scale_of
from dflash_local.planner.cards import same_card
from dflash_local.planner.fused_memory import engine_spec
from dflash_local.planner.load import Load
from dflash_local.planner.machine import Machine
from dflash_local.planner.plan import Plan
from dflash_local.planner.two_cards import even_split

CONTEXTS = (1024, 8192, 32_768, 131_072)
TABLES = "speed_tables.json"
USUAL_EXPERTS = "int4 g128"
DECODED_BYTES = 4.5  # of a weight that a prompt's chunk decodes: a code is read, bfloat16 written and read again
# Types of GGUF blocks that were not measured, and the format with as much to decode for a byte: a byte of codes of five
# and six bits takes less than one of four, and about as long as one of eight.
LIKE = {
    "Q4_0": "int4 g32",
    **dict.fromkeys(("Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS"), "int4 g32 with zeros"),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"), "int8 g32"),
    "MXFP4": "mxfp4",
}
TYPICAL = "typical of other pairs"  # begins the source of lengths that are not the pair's own


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """Holds microseconds of a launch: a constant, and for each megabyte (1e6 bytes)."""

    constant: float
    per_megabyte: float

    def us(self, megabytes: float, read: float, scale: Scale) -> float:
        """Predict one launch. ``read``: microseconds in which the table's card reads a megabyte."""
        return self.constant * scale.launch + megabytes * scale.of(self.per_megabyte, read)

    def between(self, other: LaunchTime, share: float) -> LaunchTime:
        return LaunchTime(
            self.constant + share * (other.constant - self.constant),
            self.per_megabyte + share * (other.per_megabyte - self.per_megabyte),
        )


@dataclass(frozen=True, slots=True)
class SpeedTable:
    """Holds what launches take on one card, by the rows of the pass.

    Attributes:
        card: as its driver names it. products, experts: format -> rows -> launch;
            of experts both launches of a layer. parts: rows -> microseconds beside the products of a layer's part.
            draft: microseconds of a block beside its layers, and of each of its layers. kv: queries of a key head ->
            microseconds for each megabyte of keys and values. prompt: milliseconds of a prompt for each unit of
            ``PromptWork``; its experts' by their format.
    """

    card: str
    products: Mapping[str, Mapping[int, LaunchTime]]
    experts: Mapping[str, Mapping[int, LaunchTime]]
    parts: Mapping[int, Mapping[PartKind, float]]
    draft: tuple[float, float]
    kv: Mapping[int, float]
    prompt: Mapping[str, float]

    @property
    def read(self) -> float:
        """Return microseconds in which this card reads a megabyte: those of plain weights, which take no decoding."""
        return self.products[UNQUANTIZED.name][1].per_megabyte

    def kv_per_megabyte(self, queries: int) -> float:
        """Interpolate attention with so many queries for each key head, between the measured counts around."""
        low, high, share = _around(tuple(self.kv), queries)
        return self.kv[low] + share * (self.kv[high] - self.kv[low])

    def launch(self, kind: Mapping[str, Mapping[int, LaunchTime]], format_name: str, rows: int) -> LaunchTime | None:
        """Interpolate between the measured rows around; None of a format that was not measured, nor one ``LIKE`` it."""
        measured = kind.get(format_name) or kind.get(LIKE.get(format_name, ""))
        if measured is None:
            return None
        low, high, share = _around(tuple(measured), rows)
        return measured[low].between(measured[high], share)

    def beside(self, traffic: Traffic, rows: int) -> float:
        """Return microseconds of a pass that no product takes."""
        low, high, share = _around(tuple(self.parts), rows)

        def at(rows: int) -> float:
            return sum(self.parts[rows][part] * count for part, count in traffic.parts.items())

        return at(low) + share * (at(high) - at(low))


@dataclass(frozen=True, slots=True)
class FrontSpeed:
    """Says how the first ``layers`` of a target run on a second card.

    Attributes:
        scale: of that card beside the table's. crossing_us: of the way there and back, in each pass.
    """

    layers: int
    scale: Scale
    crossing_us: float


@dataclass(frozen=True, slots=True)
class ExpectedAcceptance:
    """Holds mean acceptance lengths of single requests, the least and the most of the tasks; where they are from."""

    low: float
    high: float
    source: str


@dataclass(frozen=True, slots=True)
class Times:
    """Holds milliseconds behind so many tokens of context; the cycle drafts and verifies ``rows`` rows.

    Attributes:
        rows: of the whole block; the mean of a mix. shorter: rows and milliseconds of each known cycle that verifies
            fewer than the block. measured: on this card at about this context, not predicted or scaled.
        prompt_ms: from a prompt of as many tokens to its first token; None where that is not predicted.
    """

    context: int
    step_ms: float
    cycle_ms: float | None
    rows: float
    shorter: tuple[tuple[int, float], ...] = ()
    measured: bool = False
    prompt_ms: float | None = None

    @property
    def plain_tokens_per_s(self) -> float:
        return 1e3 / self.step_ms

    def mixed(self, cycles: Mapping[int, float]) -> Times:
        """Put the mean cycle of replies in place of one of the whole block.

        Args:
            cycles: by their rows, how many there were; those of one row are steps that drafted nothing.
        """
        if self.cycle_ms is None:
            return self
        known = {**dict(self.shorter), int(self.rows): self.cycle_ms}
        count, total = sum(cycles.values()), cycles.get(1, 0.0) * self.step_ms
        for rows in cycles.keys() - {1}:
            low, high, share = _around(tuple(known), rows)
            total += cycles[rows] * (known[low] + share * (known[high] - known[low]))
        mean_rows = sum(rows * cycles[rows] for rows in cycles) / count
        return replace(self, cycle_ms=total / count, rows=mean_rows)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicts a plan. basis: which card's table, and by what it was scaled."""

    times: tuple[Times, ...]
    acceptance: ExpectedAcceptance | None
    basis: str

    @property
    def gain(self) -> tuple[float, float] | None:
        """Say how many times as fast as plain decoding drafting is, behind the first context, at both lengths."""
        drafted = self.drafted_tokens_per_s(self.times[0])
        plain = self.times[0].plain_tokens_per_s
        return drafted and (drafted[0] / plain, drafted[1] / plain)

    @property
    def least_tokens_per_s(self) -> float:
        """Return what to count on: plain, or drafted at the lowest acceptance length where that is faster."""
        plain = self.times[0].plain_tokens_per_s
        return max(plain, (self.drafted_tokens_per_s(self.times[0]) or (plain,))[0])

    def drafted_tokens_per_s(self, one: Times) -> tuple[float, float] | None:
        """Predict it at the lowest and highest acceptance length; None where no length is known."""
        if self.acceptance is None or one.cycle_ms is None:
            return None
        return 1e3 * self.acceptance.low / one.cycle_ms, 1e3 * self.acceptance.high / one.cycle_ms

    def as_dict(self) -> dict[str, Any]:
        lengths = self.acceptance
        return {
            "basis": self.basis,
            "acceptance": None if lengths is None else asdict(lengths),
            "at": [
                {
                    **asdict(each),
                    "plain_tokens_per_s": each.plain_tokens_per_s,
                    "drafted_tokens_per_s": list(self.drafted_tokens_per_s(each) or ()) or None,
                }
                for each in self.times
            ],
        }


def predict(
    found: Plan, target: ModelConfig, drafter: Drafter | None, lengths: ExpectedAcceptance | None = None
) -> Prediction | None:
    """Predict the speed of a plan; None for another engine than the fused one but on a CPU, an unknown card or format.

    Args:
        target: as published. lengths: that are expected of the drafter.
    """
    drafter, load = drafter if found.load.draft else None, found.load
    contexts = [context for context in CONTEXTS if context <= (found.context or 0)] or [found.context or CONTEXTS[0]]
    if found.machine.kind == "cpu":
        ms = [(context, cpu_speed.cpu_ms(found, target, drafter, context)) for context in contexts]
        rows = 1 if drafter is None else drafter.block_size
        on_cpu = tuple(Times(context, *each, rows) for context, each in ms if each is not None)
        cycles = any(one.cycle_ms is not None for one in on_cpu)
        return Prediction(on_cpu, lengths if cycles else None, cpu_speed.basis(found)) if on_cpu else None
    scaled = _scaled(found.machine) if found.engine == "fused" and found.dtype == "bfloat16" else None
    if scaled is None:
        return None
    drafter, model = drafters_of(target, drafter, load), quantized(target, load.quantize)

    def load_of(context: int) -> Load:
        return Load.of(found.machine.kind, load, context, found.block_size or 1)

    front = scaled.front(model, drafter, load_of(found.context or contexts[0]))  # split as the plan splits it
    if load.drafter_precision == "auto":  # the engine takes 8 bits wherever they are faster: on all cards measured
        load = replace(load, drafter_precision="8bit")
    times = []
    for context in contexts:
        one = times_of(model, drafter, load_of(context), scaled.table, scaled.scale, front)
        if one is None:
            return None
        first = prompt_ms(model, context, scaled.table, scaled.scale, load.prefill_chunk, front)
        times.append(replace(one, prompt_ms=first))
    return Prediction(tuple(times), None if drafter is None else lengths, scaled.basis)


def predict_load(machine: Machine, target: ModelConfig, drafter: Drafter | None, load: Load) -> Prediction | None:
    """Predict a load at its own context, without what was measured on the card; None of an unknown card."""
    scaled = _scaled(machine)
    if scaled is None:
        return None
    times = times_of(target, drafter, load, scaled.table, scaled.scale, scaled.front(target, drafter, load))
    return None if times is None else Prediction((times,), None, scaled.basis)


def times_of(
    target: ModelConfig,
    drafter: Drafter | None,
    load: Load,
    table: SpeedTable,
    scale: Scale,
    front: FrontSpeed | None = None,
) -> Times | None:
    """Predict step and cycle behind ``load.context`` tokens; None where a format was not measured.

    Args:
        scale: of the card beside the table's. front: where the first layers lie on a second one.
    """
    spec = engine_spec(drafter, load)
    dtypes = spec.dtype, spec.cache_dtype
    parts = [(1, target_traffic(target, *dtypes), scale)]
    if front is not None:  # their time on that card in place of the one on this
        ahead = layers_traffic(front_model(target, front.layers), *dtypes)
        parts += [(1, ahead, front.scale), (-1, ahead, scale)]

    def target_us(rows: int) -> float | None:
        total = 0.0 if front is None else front.crossing_us
        for sign, traffic, at in parts:
            us = pass_us(traffic, rows, load.context, table, at)
            if us is None:
                return None
            total += sign * us
        return total

    step = target_us(1)
    if step is None or drafter is None:
        return None if step is None else Times(load.context, step / 1e3, None, 1)
    of_pass = drafter.draft_rows // drafter.passes
    draft = draft_us(_draft_traffic(drafter, target, spec), of_pass, load.context, table, scale)
    block, cycles = drafter.block_size, []
    for rows in (*(rows for rows in table.parts if 1 < rows < block), block):
        verify = target_us(rows)
        if verify is None or draft is None:
            return None
        share = (rows - 1) / drafter.passes if drafter.passes > 1 else 1.0  # of a chain as many as are verified
        cycles.append((rows, (verify + share * draft) / 1e3))
    *shorter, (_, whole) = cycles
    return Times(load.context, step / 1e3, whole, block, tuple(shorter))


def draft_us(traffic: Traffic, rows: int, context: int, table: SpeedTable, scale: Scale) -> float | None:
    """Predict the microseconds of drafting, with the context rows that a cycle adds; see ``pass_us``.

    Args:
        rows: of each of the drafter's passes.
    """
    once, each_layer = table.draft
    return pass_us(traffic, rows, context, table, scale, once + each_layer * traffic.parts["attention"])


@lru_cache(maxsize=512)  # plans of many contexts ask for the same
def _draft_traffic(drafter: Drafter, target: ModelConfig, spec: EngineSpec) -> Traffic:
    return drafter.traffic(target, spec)


def pass_us(
    traffic: Traffic, rows: int, context: int, table: SpeedTable, scale: Scale, beside: float | None = None
) -> float | None:
    """Predict the microseconds of a pass over so many rows; None where a format was not measured.

    Args:
        beside: microseconds on the table's card that no product takes, where the table's of a target do not hold.
    """
    total = (table.beside(traffic, rows) if beside is None else beside) * scale.launch
    total += traffic.context_bytes(context) / 1e6 * scale.of(table.kv_per_megabyte(rows * traffic.group), table.read)
    products = [(table.products, each, float(each.bytes), count) for each, count in traffic.products.items()]
    for experts, layers in traffic.experts.items():
        products.append((table.experts, experts.product, experts.product.bytes * experts.distinct(rows), layers))
    for kind, product, size, count in products:
        launch = table.launch(kind, product.format, rows)
        if launch is None:
            return None
        total += count * launch.us(size / 1e6, table.read, scale)
    return total


def prompt_ms(
    target: ModelConfig,
    tokens: int,
    table: SpeedTable,
    scale: Scale,
    chunk: int | None = None,
    front: FrontSpeed | None = None,
) -> float:
    """Predict the milliseconds from a prompt of so many tokens to its first token. Experts in a format that was not
    measured count as those of ``USUAL_EXPERTS``.

    Args:
        chunk: as of ``prompt_work``. front: as of ``times_of``; the way there and back is left out.
    """
    if front is not None:
        ahead, chunk = front_model(target, front.layers), prompt_chunk(target, tokens, chunk)
        there, here = (prompt_ms(ahead, tokens, table, at, chunk) for at in (front.scale, scale))
        return prompt_ms(target, tokens, table, scale, chunk) + there - here
    work, ms = prompt_work(target, tokens, chunk), table.prompt
    multiplied = work.products * ms["products"] + work.attention * ms["attention"] + work.recurrent * ms["recurrent"]
    decoded = [
        (work.decoded, ms["decoded"]),
        *((count, ms.get(form, ms[USUAL_EXPERTS])) for form, count in work.experts.items()),
    ]
    moved = DECODED_BYTES * table.read
    return multiplied * scale.matrix + sum(count * scale.of(each, moved) for count, each in decoded)


def acceptance(published: Iterable[Published], block: int) -> ExpectedAcceptance | None:
    """Return the range of the tasks' lengths with the pair's own block, see ``lengths_of``; None where none is
    published.

    ``source`` is that of the lowest and of the highest, with the number of requests where that is not one.
    """
    cells = {cell.acceptance_length or 0.0: cell for cell in lengths_of(published, block)}
    if not cells:
        return None
    low, high = min(cells), max(cells)
    sources: dict[str, None] = {}
    for cell in (cells[low], cells[high]):
        many = "number of requests not stated" if cell.concurrency is None else f"{cell.concurrency} requests at once"
        sources[cell.source if cell.concurrency == 1 else f"{cell.source} ({many})"] = None
    return ExpectedAcceptance(low, high, "; ".join(sources))


def typical(rows: Iterable[Row], kind: str, block: int, generation: str | None = None) -> ExpectedAcceptance | None:
    """Return the range over the published pairs with this block: of this kind and generation of drafter, else of this
    kind,
    else of any; None where no pair with this block is published. A drafter that comes with the program is typical of
    none: its target is a fraction of the others'.
    """
    found = [(row, lengths_of(row.published, block)) for row in rows if row.bundled_drafter is None]
    cells = [(row, cell) for row, cells in found for cell in cells]
    alike = [(row, cell) for row, cell in cells if row.kind == kind]
    nearest = [(row, cell) for row, cell in alike if cell.generation == generation] or alike or cells
    if not nearest:
        return None
    lengths = [cell.acceptance_length or 0.0 for _, cell in nearest]
    count = len({row.name for row, _ in nearest})
    words = f"{TYPICAL}: {count} with block {block} have published lengths"
    return ExpectedAcceptance(min(lengths), max(lengths), words)


@cache
def tables() -> tuple[SpeedTable, ...]:
    """Read those that come with the program."""
    try:
        text = resources.files(__package__).joinpath(TABLES).read_text(encoding="utf-8")
        return tuple(_table(entry) for entry in parse_json(text)["tables"])
    except (KeyError, TypeError, ValueError) as error:
        raise SettingsError(f"{TABLES}: {error}", "install the program anew") from error


def _table(entry: Mapping[str, Any]) -> SpeedTable:
    def launches(kinds: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[int, LaunchTime]]:
        return {name: {int(rows): LaunchTime(*pair) for rows, pair in at.items()} for name, at in kinds.items()}

    return SpeedTable(
        card=entry["card"],
        products=launches(entry["products"]),
        experts=launches(entry["experts"]),
        parts={int(rows): at for rows, at in entry["parts"].items()},
        draft=(entry["draft"][0], entry["draft"][1]),
        kv={int(queries): us for queries, us in entry["kv"].items()},
        prompt=entry["prompt"],
    )


@dataclass(frozen=True, slots=True)
class _ScaledTable:
    """Says how a machine's card compares with the table's, and in words how that is known.

    Attributes:
        second: of two cards how the second one compares, the way there and back in microseconds, and free bytes of
            both; None of one card.
    """

    table: SpeedTable
    scale: Scale
    basis: str
    second: tuple[Scale, float, tuple[int, ...]] | None = None

    def front(self, target: ModelConfig, drafter: Drafter | None, load: Load) -> FrontSpeed | None:
        """Say how the first layers run on the second of two cards, as many as a load puts there; None of one card."""
        if self.second is None:
            return None
        scale, crossing, free = self.second
        return FrontSpeed(even_split(target, drafter, load, free).layers, scale, crossing)


def _scaled(machine: Machine) -> _ScaledTable | None:
    """Compare a card, or the first two over which layers are spread, with the table's; None where one is unknown."""
    (table,) = tables()
    fitted = f"fitted to measurements of one {table.card} with random weights"
    scales, words = list[Scale](), dict[str, str]()
    cards = machine.cards[:2] or (machine,)
    for card in cards:
        same = card.probe is None and same_card(table.card, card.name)
        scaled = (SAME, "") if same else scale_of(card.name, table.card, card.probe)
        if scaled is None:
            return None
        scales.append(scaled[0])
        words[card.name] = scaled[1]
    told = [f"{name} {how}" if len(words) > 1 else how for name, how in words.items() if how]
    if len(cards) == 1:
        return _ScaledTable(table, scales[0], "; ".join([fitted, *told]))
    crossing, way = crossing_us(cards[0].name, cards[1].name, cards[0].probe)
    basis = "; ".join([fitted, *told, way])
    return _ScaledTable(table, scales[0], basis, (scales[1], crossing, machine.free_of_cards[:2]))


def _around(measured: tuple[int, ...], rows: int) -> tuple[int, int, float]:
    """Return the measured row counts below and above, and how far between them so many rows lie."""
    low = max((count for count in measured if count <= rows), default=min(measured))
    high = min((count for count in measured if count >= rows), default=max(measured))
    return low, high, 0.0 if low == high else (rows - low) / (high - low)
