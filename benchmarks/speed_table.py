"""Fits what launches take on a card to measurements of it: the table that plans predict speeds with.

    PYTHONPATH=. python benchmarks/speed_table.py [--write]

Reads products, experts and whole passes in ``benchmarks/results`` (random weights), prints predicted beside measured
steps and cycles, and with ``--write`` writes ``dflash_local/planner/speed_tables.json``. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_local.app.fitting import Shapes, shapes
from dflash_local.app.resolve import of_row
from dflash_local.bench import report
from dflash_local.catalog import registry
from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.config.features import ModelConfig
from dflash_local.config.quantization import WHOLE, Quantization, StoredFormat, StoredFp4, StoredFp8, StoredInt
from dflash_local.config.quantizers import USUAL, read_quantization
from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.layout.linear import weight_format
from dflash_local.layout.prompt_work import prompt_work
from dflash_local.layout.traffic import PARTS, Traffic, target_traffic
from dflash_local.load_config import LoadConfig
from dflash_local.planner import speed
from dflash_local.planner.card_probe import SAME, Scale, scale_of
from dflash_local.planner.fused_memory import engine_spec
from dflash_local.planner.load import Load
from dflash_local.planner.speed import LaunchTime, SpeedTable, prompt_ms, times_of

CARD = "NVIDIA H200"
RESULTS = Path(__file__).parent / "results"
TABLE = Path(speed.__file__).with_name(speed.TABLES)
ROWS = (1, 4, 8, 16)
PROMPTS, LEAST_CHUNK = "h100_prompts", 2048  # of mixtures, smaller ones waited for a busy host
MULTIPLIED = ("products", "attention", "recurrent")
WORK = (*MULTIPLIED, "decoded")  # of ``PromptWork``, beside experts
LEAST = 1e3 / 4390  # microseconds of a megabyte: what a sum over memory reads on this card
# Microseconds of a megabyte of keys and values by the queries of a key head: passes of predicted_speed.py's pairs at
# 8,192 tokens less those at 1,024.
KV = {4: 0.34, 8: 0.46, 64: 0.55, 128: 1.5}
# The formats of the records of products and of experts.
FORMATS: Mapping[str, StoredFormat | None] = {
    "bf16": None,
    "int4 g128": StoredInt("gptq", 128),
    "int4 g128 zeros": StoredInt("awq", 128, zeros=True),
    "int4 g64": StoredInt("gptq", 64),
    "int4 g32": StoredInt("gptq", 32),
    "int4 g32 zeros": StoredInt("awq", 32, zeros=True),
    "int8 rows": StoredInt("pack-quantized", WHOLE, bits=8),
    "int8 g128": StoredInt("pack-quantized", 128, bits=8),
    "int8 g32": StoredInt("pack-quantized", 32, bits=8),
    "int8 g32 zeros": StoredInt("pack-quantized", 32, zeros=True, bits=8),
    "fp8": StoredFp8((128, 128)),
    "fp8 rows": StoredFp8((1, WHOLE)),
    "MXFP4": StoredFp4("mxfp4"),
    "NVFP4": StoredFp4("nvfp4"),
}
ALIKE = {StoredFp8((WHOLE, WHOLE)).name: StoredFp8((1, WHOLE)).name}  # kept as the other is
STORED = {"bf16": None, "fp8": "fp8", "int4": "int4-g128"}  # of predicted_speed.py
# Passes of its combinations: the H200's records have steps alone.
COMBINATIONS = ("h100_passes", "h200_predicted_speed")
# Whole passes.
PASSES = (
    *("qwen3_8b_auto", "llama31_8b_auto", "qwen35_9b_bf16_beside", "qwen35_9b_int4_g128", "qwen35_9b_fp8"),
    *("qwen35_27b_auto", "qwen35_27b_int4_g128", "qwen35_27b_fp8", "qwen35_35b_a3b_bf16_uniform"),
    *("qwen35_35b_a3b_int4_g128_uniform", "qwen35_35b_a3b_fp8_uniform", "qwen3_coder_30b_a3b_bf16_uniform"),
    *("qwen3_coder_30b_a3b_int4_g128_uniform", "gpt_oss_20b_uniform", "gpt_oss_120b_uniform"),
    *("qwen35_122b_a10b_int4_g128_uniform", "qwen3_coder_next_fp8_uniform"),
)


@dataclass(frozen=True)
class Measured:
    """A record of ``dflash bench --weights random`` and the pair that it is of, at its shortest context."""

    name: str
    target: ModelConfig
    drafter: DFlashConfig
    at: Mapping[str, Any]
    scale: Scale = SAME
    prompt: Mapping[str, Any] = field(default_factory=dict)  # its tokens, the chunk, the seconds

    @property
    def load(self) -> Load:
        """Drafters were measured in 8 bits."""
        config = LoadConfig(drafter_precision="8bit")
        return Load.of("cuda", config, self.at["context"], self.drafter.block_size)

    @property
    def traffic(self) -> Traffic:
        return target_traffic(self.target, "bfloat16", "bfloat16")

    def verify_us(self, rows: int) -> float | None:
        found = self.at["verify"].get(str(rows))
        return None if found is None else float(found["ms"]) * 1e3


def known_pair(name: str) -> Shapes:
    row = registry.load().find(name)
    known = None if row is None else shapes(of_row(row), None)
    if known is None or known.drafter is None:
        raise SystemExit(f"no shape of {name}")
    return known


def recorded(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def records() -> list[Measured]:
    found = []
    for name in PASSES:
        record = recorded(f"h200_bench_{name}")
        known, of_card = known_pair(record["target"]), record["measured"]
        model = stored_as(known.target, STORED.get(form_of(record) or "as published"))
        found.append(Measured(name, model, known.drafter, of_card["at"][0]))
    return found


def form_of(record: Mapping[str, Any]) -> str | None:
    """Which of ``STORED`` a report of ``dflash bench --weights random`` is of."""
    names = {form: stored and stored_in(stored).name for form, stored in STORED.items()}
    return next((form for form, name in names.items() if name == record.get("stored")), None)


def stored_in(stored: str) -> Quantization | None:
    """A format of ``USUAL`` as a target has it."""
    return read_quantization(ConfigFields(USUAL[stored], stored))


def stored_as(target: ModelConfig, stored: str | None) -> ModelConfig:
    """A target whose weights are published in a format of ``USUAL``."""
    return target if stored is None else replace(target, quantization=stored_in(stored))


def combinations() -> list[Measured]:
    """Those of ``COMBINATIONS``, each at two contexts."""
    found = []
    for file in COMBINATIONS:
        record = recorded(file)
        scaled = scale_of(record["card"], CARD, None)
        if scaled is None:
            raise SystemExit(f"nothing is known of {record['card']}")
        for entry in record["entries"]:
            known = known_pair(entry["pair"])
            target = stored_as(known.target, STORED[entry["format"]])
            for context, at in entry.get("at", entry.get("measured", {}).get("at")).items():
                verify = at.get("verify") or {"1": at["step_ms"]}
                passes = {"context": int(context), "verify": {count: {"ms": ms} for count, ms in verify.items()}}
                name = f"{file} {entry['pair']} {entry['format']}"
                found.append(Measured(name, target, known.drafter, passes, scaled[0]))
    return found


def products() -> dict[str, dict[int, LaunchTime]]:
    """A line through the times of ten shapes, for each format and number of rows."""
    measured = recorded("h200_few_row_gemm")["us"]
    found: dict[str, dict[int, LaunchTime]] = {}
    for name, stored in FORMATS.items():
        form = weight_format(stored)
        for rows in ROWS:
            points = []
            for shape, formats in measured.items():
                size = [int(part) for part in re.findall(r"\d+", shape)[:2]]
                us = formats[name][str(rows)]
                buffers = form.buffers("", *size, "bfloat16", "head")
                megabytes = sum(buffer.nbytes for buffer in buffers) / 1e6
                points.append((megabytes, min(us.values()) if isinstance(us, dict) else us))
            matrix, wanted = [[1.0, megabytes] for megabytes, _ in points], [us for _, us in points]
            found.setdefault(form.name, {})[rows] = LaunchTime(*weighted(matrix, wanted))
    return found | {alike: found[kept] for alike, kept in ALIKE.items()}


def experts(products: Mapping[str, Mapping[int, LaunchTime]]) -> dict[str, dict[int, LaunchTime]]:
    """Both launches of a layer: one constant for all formats, a rate for each, none faster than the card reads. Formats
    that were not measured have the rate of their products; four rows have that of eight.
    """
    measured = recorded("h200_expert_gemm")["us"]
    points: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for model, cases in measured.items():
        name = weight_format(FORMATS[model.partition(" ")[2]]).name
        for case, figures in cases.items():
            if isinstance(figures, dict):
                one = figures["bytes"] / 1e6, figures["products"]
                points.setdefault(int(case.split()[0]), {}).setdefault(name, []).append(one)
    found: dict[str, dict[int, LaunchTime]] = {}
    for rows, formats in points.items():
        names = list(formats)
        seen = [(name, mb, us) for name in names for mb, us in formats[name]]
        matrix = [[1.0, *(mb * (name == each) for each in names)] for name, mb, _ in seen]
        constant, *more = scaled(matrix, [us - LEAST * mb for _, mb, us in seen], [us for *_, us in seen])
        known = {name: LEAST + rate for name, rate in zip(names, more)}
        for name, launches in products.items():
            rate = known.get(name, launches[rows].per_megabyte)
            found.setdefault(name, {})[rows] = LaunchTime(constant, rate)
    return {name: {1: at[1], 4: at[8], 8: at[8], 16: at[16]} for name, at in found.items()}


def weighted(matrix: Sequence[Sequence[float]], us: Sequence[float]) -> list[float]:
    """Least squares of relative errors without negative coefficients: the most negative one is left out in turn."""
    rows, wanted = np.array(matrix, float), np.array(us, float)
    kept = list(range(rows.shape[1]))
    while True:
        found = np.linalg.lstsq(rows[:, kept] / wanted[:, None], np.ones(len(wanted)), rcond=None)[0]
        if (found >= 0).all():
            break
        del kept[int(np.argmin(found))]
    coefficients = [0.0] * rows.shape[1]
    for index, value in zip(kept, found):
        coefficients[index] = float(value)
    return coefficients


def fitted(measured: Sequence[Measured]) -> SpeedTable:
    """Products and experts by themselves; then what whole passes take beside them, and which share of a product's
    constant: the rest passes while the kernel in front of it runs.
    """
    known = products()
    table = SpeedTable(
        card=CARD,
        products=known,
        experts=experts(known),
        parts={rows: dict.fromkeys(PARTS, 0.0) for rows in ROWS},
        draft=(0.0, 0.0),
        kv=KV,
        prompt={},
    )
    parts, shares = {}, {}
    for rows in ROWS:
        seen = [(each, us) for each in (*measured, *combinations()) if (us := each.verify_us(rows)) is not None]
        counts, rest = [], []
        for each, us in seen:
            constants = sum(
                count * table.launch(known, product.format, rows).constant
                for product, count in each.traffic.products.items()
            )
            counts.append([constants, *(each.traffic.parts.get(part, 0) for part in PARTS)])
            rest.append(us + constants - speed.pass_us(each.traffic, rows, each.at["context"], table, each.scale))
        shares[rows], *times = scaled(counts, rest, [us for _, us in seen])
        parts[rows] = dict(zip(PARTS, times))
    overlapped = {
        name: {rows: replace(launch, constant=shares[rows] * launch.constant) for rows, launch in by_rows.items()}
        for name, by_rows in known.items()
    }
    table = replace(table, parts=parts, products=overlapped)
    counts, rest, total = [], [], []
    for each in measured:
        drafting = each.drafter.traffic(each.target, engine_spec(each.drafter, each.load))
        us = 1e3 * (each.at["draft"]["ms"] + each.at["context_rows"]["ms"])
        counts.append([1.0, each.drafter.num_layers])
        rest.append(us - speed.draft_us(drafting, each.drafter.draft_rows, each.load.context, table, SAME))
        total.append(us)
    once, each_layer = scaled(counts, rest, total)
    return replace(table, draft=(once, each_layer), prompt=prompts(table.read))


def prompt_records() -> list[Measured]:
    """Prompts of ``PROMPTS``, but for small chunks of mixtures, which waited for the host."""
    record = recorded(PROMPTS)
    scaled, found = scale_of(record["card"], CARD, None), []
    assert scaled is not None
    for entry in record["entries"]:
        known = known_pair(entry["pair"])
        target = stored_as(known.target, entry["format"] if entry["format"] in USUAL else None)
        prompt = {**entry, "s": entry["tokens"] / entry["tokens_per_s"]}
        if target.dense or entry["chunk"] > LEAST_CHUNK:
            found.append(Measured(entry["pair"], target, known.drafter, {}, scaled[0], prompt))
    return found


def prompts(read: float) -> dict[str, float]:
    """Milliseconds for each unit of ``PromptWork``; ``read``: microseconds of a megabyte."""
    records = prompt_records()
    works = [prompt_work(each.target, each.prompt["tokens"], each.prompt["chunk"]) for each in records]
    counts = [{**{kind: getattr(work, kind) for kind in WORK}, **work.experts} for work in works]
    kinds = list(dict.fromkeys(kind for each in counts for kind in each))
    ms = weighted(
        [[one.get(kind, 0.0) for kind in kinds] for one in counts], [1e3 * each.prompt["s"] for each in records]
    )
    return {kind: unscaled(kind, value, records[0].scale, read) for kind, value in zip(kinds, ms)}


def unscaled(kind: str, ms: float, scale: Scale, read: float) -> float:
    """What a unit takes on ``CARD``, as ``speed.prompt_ms`` scales it."""
    if kind in MULTIPLIED:
        return ms / scale.matrix
    return ms / scale.bytes if ms / scale.bytes <= speed.DECODED_BYTES * read else ms / scale.work


def scaled(counts: Sequence[Sequence[float]], rest: Sequence[float], total: Sequence[float]) -> list[float]:
    """Of what is left of totals, by errors relative to these."""
    weights = [[value * part / whole for value in row] for row, part, whole in zip(counts, rest, total) if part > 0]
    return weighted(weights, [part * part / whole for part, whole in zip(rest, total) if part > 0])


def as_json(table: SpeedTable) -> dict[str, Any]:
    """As ``planner.speed`` reads it."""

    def launches(kinds: Mapping[str, Mapping[int, LaunchTime]]) -> dict[str, Any]:
        return {
            name: {str(rows): [round(at.constant, 2), round(at.per_megabyte, 4)] for rows, at in by_rows.items()}
            for name, by_rows in kinds.items()
        }

    return {
        "card": table.card,
        "products": launches(table.products),
        "experts": launches(table.experts),
        "parts": {str(rows): {part: round(us, 2) for part, us in at.items()} for rows, at in table.parts.items()},
        "draft": [round(us, 1) for us in table.draft],
        "kv": {str(queries): us for queries, us in table.kv.items()},
        "prompt": {name: round(ms, 4) for name, ms in table.prompt.items()},
    }


def compared(predicted: float, measured: float) -> str:
    return f"{predicted:.2f} / {measured:.2f} {predicted / measured - 1:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    args = parser.parse_args()
    measured = records()
    table = fitted(measured)
    lines = []
    for each in measured:
        times = times_of(each.target, each.drafter, each.load, table, SAME)
        step, cycle = each.at["ar_step"]["ms"], each.at["cycle"].get(str(each.drafter.block_size))
        if times is None or times.cycle_ms is None or cycle is None:
            raise SystemExit(f"{each.name}: a format or a cycle is missing")
        lines.append((each.name, *map(compared, (times.step_ms, times.cycle_ms), (step, cycle["ms"]))))
    print("\n".join(report.table(("ms, predicted / measured", "step", "cycle"), lines)))
    lines = [
        (each.name, str(each.prompt["tokens"]), str(each.prompt["chunk"]), compared(predicted, 1e3 * each.prompt["s"]))
        for each in prompt_records()
        for predicted in [prompt_ms(each.target, each.prompt["tokens"], table, each.scale, each.prompt["chunk"])]
    ]
    print("\n".join(report.table(("prompt, predicted / measured", "tokens", "chunk", "ms"), lines)))
    if args.write:
        note = "made by benchmarks/speed_table.py: microseconds of a launch [constant, for each 1e6 bytes], by rows"
        TABLE.write_text(json.dumps({"note": note, "tables": [as_json(table)]}, indent=1) + "\n", encoding="utf-8")
        print(f"written: {TABLE.name}")


if __name__ == "__main__":
    main()
