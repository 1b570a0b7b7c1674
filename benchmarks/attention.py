"""Decode attention's configurations on one CUDA GPU: checks, then the time of each at four lengths, then the best.

``PYTHONPATH=. python benchmarks/attention.py [--out FILE.json] [--quick]``: under a minute of the GPU. Shapes are
Qwen3.5-9B's target (16 query heads, 4 KV heads of head_dim 256) and drafter (32, 8, 128), blocks have 16 rows; numbers
are random. Prints microseconds of a layer and TB/s of the keys and values that it must read, and lines for
``CONFIGS`` in dflash_local/kernels/split_kv.py. "bytes" is an eight-bit cache read as older cards read it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from dflash_local.kernels.decode_attention import AttentionMask, SplitKV, decode_attention, decode_attention_reference
from dflash_local.kernels.jit import power_of_two
from dflash_local.kernels.split_kv import CONFIGS, DecodeConfig, device_properties
from dflash_local.kernels.timing import replay_ms
from dflash_local.layout.split_kv import fixed_splits

EIGHT = torch.float8_e4m3fn
KINDS = {"bf16": torch.bfloat16, "fp8": EIGHT, "bytes": torch.uint8}
Cache = tuple[torch.Tensor, torch.Tensor]
Form = tuple[int, int, int]  # step, warps, stages
ROWS = 16
CONTEXTS = (1024, 8192, 32768, 131072)
COLD = 128 << 20  # bytes of caches that are read in turn, so that none is found in the second-level cache
PROGRAMS, MIN_SPLIT_SIZES = (1, 2, 4, 8), (32, 64, 128)
FORMS = (*itertools.product((32, 64), (4, 8), (2, 3, 4)), (128, 4, 2), (128, 8, 2))
WORKERS = 12  # compile at the same time


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of a layer. causal: a row is blind to later rows of its block."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool


SHAPES = (Shape("target", 16, 4, 256, True), Shape("drafter", 32, 8, 128, False))


@dataclass(frozen=True, slots=True)
class Time:
    """A configuration's time of one layer."""

    shape: str
    kind: str
    context: int
    config: DecodeConfig
    us: float
    tbs: float


def table_config(shape: Shape, kind: str) -> DecodeConfig:
    """The one that is entered."""
    return CONFIGS[(2 if kind == "bf16" else 1, shape.head_dim)]


class Layers:
    """Caches of one kind and length, as many as it takes to find none of them warm."""

    def __init__(self, shape: Shape, kind: str, context: int, least: int = COLD) -> None:
        self.shape, self.context, dtype = shape, context, KINDS[kind]
        room = context + 2 * ROWS
        size = 1 if kind != "bf16" else 2
        self.bytes = 2 * shape.num_kv_heads * (context + ROWS) * shape.head_dim * size
        count = max(math.ceil(least / self.bytes), 1)
        self.max_seq_len = power_of_two(context + ROWS)
        one = torch.randn(shape.num_kv_heads, room, shape.head_dim, device="cuda", dtype=torch.bfloat16)
        one = one if kind == "bf16" else one.to(EIGHT).view(dtype)
        self.caches = [(one.clone(), one.clone()) for _ in range(count)]
        self.queries = torch.randn(ROWS, shape.num_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(ROWS, shape.num_heads * shape.head_dim, device="cuda", dtype=torch.bfloat16)
        self.start = torch.tensor([context], dtype=torch.int32, device="cuda")

    def room(self, fixed: bool = False) -> SplitKV:
        """For the partial results of any configuration that is tried."""
        count = fixed_splits(self.max_seq_len) if fixed else 512
        outputs = torch.empty(count, ROWS, self.shape.num_heads, self.shape.head_dim, device="cuda")
        return SplitKV(outputs, torch.empty(count, ROWS, self.shape.num_heads, 2, device="cuda"), fixed)

    def work(self, config: DecodeConfig, partials: SplitKV) -> Callable[[], None]:
        """Every layer once."""
        mask = AttentionMask(causal=self.shape.causal)

        def run() -> None:
            for cache in self.caches:
                decode_attention(
                    self.queries, cache, self.start, self.out, partials, self.max_seq_len, mask, config=config
                )

        return run

    def microseconds(self, config: DecodeConfig, partials: SplitKV) -> float:
        """Of a layer, launches left out."""
        return replay_ms(self.work(config, partials), 5) * 1000 / len(self.caches)


def checks() -> dict[str, bool]:
    """What the interpreter cannot say of a card: codes, the reference, a row's bits."""
    found = codes()
    for shape, kind in itertools.product(SHAPES, KINDS):
        torch.manual_seed(0)
        layers = Layers(shape, kind, 5000, 1)
        for name, passed in of_layers(layers, kind).items():
            found[f"{shape.name} {kind}: {name}"] = passed
    return found


def of_layers(layers: Layers, kind: str) -> dict[str, bool]:
    """One layer beside its reference and its widened cache; its rows at other indices, among others."""
    fixed, cache, queries = layers.room(True), layers.caches[0], layers.queries
    real = (cache[0].view(EIGHT), cache[1].view(EIGHT)) if kind == "bytes" else cache
    config, mask = table_config(layers.shape, kind), AttentionMask(causal=layers.shape.causal)

    def run(
        rows: torch.Tensor, over: Cache, start: int, room: SplitKV, max_seq_len: int, see: AttentionMask
    ) -> torch.Tensor:
        at, out = torch.full_like(layers.start, start), torch.empty_like(layers.out)
        return decode_attention(rows, over, at, out, room, max_seq_len, see, config=config)

    ours = run(queries, cache, layers.context, layers.room(), layers.max_seq_len, mask)
    want = decode_attention_reference(queries, real, layers.start, torch.empty_like(layers.out), mask)
    found = {"near the reference": bool(((ours - want).abs() <= 2**-7 * want.abs().max()).all())}
    wide = (real[0].bfloat16(), real[1].bfloat16())
    one, two = (run(queries, over, 4990, fixed, 8192, AttentionMask()) for over in (cache, wide))
    found["as the widened cache"] = bool(((one - two).abs() < 1e-3).all())
    for start, index in ((4096, 3), (4093, 3), (4900, 15), (4999, 7)):
        others, later = torch.randn_like(queries), (cache[0].clone(), cache[1].clone())
        others[0] = queries[index]
        behind = start + index + 1
        for part in later:
            part[:, behind:] = part[:, : part.shape[1] - behind].clone()
        rows = run(queries, cache, start, fixed, 8192, AttentionMask())
        moved = run(others, later, start + index, fixed, 6000, AttentionMask())
        found[f"row {index} at {start} moved"] = torch.equal(rows[index], moved[0])
    return found


def codes() -> dict[str, bool]:
    """Each code's value, through an attention that sees one key only."""
    found = {}
    for kind in ("fp8", "bytes"):
        every = torch.arange(256, dtype=torch.uint8, device="cuda")
        every = torch.where((every & 0x7F) == 0x7F, torch.zeros_like(every), every)
        values = every.view(1, 1, 256).expand(4, 32, 256).contiguous().view(KINDS[kind])
        queries = torch.zeros(ROWS, 16, 256, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(ROWS, 16 * 256, device="cuda", dtype=torch.bfloat16)
        start = torch.zeros(1, dtype=torch.int32, device="cuda")
        partials = SplitKV.allocate(ROWS, 16, 256, 32, out.device)
        decode_attention(
            queries,
            (torch.zeros_like(every).expand(4, 32, 256).contiguous().view(values.dtype), values),
            start,
            out,
            partials,
            32,
            AttentionMask(),
            config=DecodeConfig(),
        )
        found[f"{kind}: every code"] = torch.equal(out.view(-1, 256)[0], every.view(EIGHT).to(out.dtype))
    return found


def compiled(task: tuple[Shape, str, Form]) -> tuple[Shape, str, Form] | None:
    """Compile one form into the disk cache; None where the card has no room for it."""
    shape, kind, form = task
    layers = Layers(shape, kind, 64, 1)
    config = DecodeConfig(*form, min_split_size=128)
    try:
        layers.work(config, layers.room())()
        if form == (
            table_config(shape, kind).block_kv,
            table_config(shape, kind).num_warps,
            table_config(shape, kind).num_stages,
        ):
            layers.work(config, layers.room(True))()
        torch.cuda.synchronize()
    except Exception as error:  # whatever Triton says of a form that does not fit
        print(f"left out: {shape.name} {kind} {form}: {str(error).splitlines()[0][:90]}")
        return None
    return task


def sweep(forms: dict[tuple[str, str], list[Form]]) -> Iterator[Time]:
    """Times of every form and number of programs."""
    for shape, kind, context in itertools.product(SHAPES, KINDS, CONTEXTS):
        layers = Layers(shape, kind, context)
        partials = layers.room()
        for form, programs in itertools.product(forms[(shape.name, kind)], PROGRAMS):
            config = DecodeConfig(*form, programs_per_sm=programs, min_split_size=128)
            us = layers.microseconds(config, partials)
            yield Time(shape.name, kind, context, config, us, layers.bytes / us / 1e6)
        torch.cuda.empty_cache()


def report(times: list[Time]) -> dict[tuple[str, str], DecodeConfig]:
    """Prints each length's best; gives the configuration that loses least over all lengths."""
    best: dict[tuple[str, str], DecodeConfig] = {}
    for shape, kind in itertools.product(SHAPES, KINDS):
        mine = [time for time in times if (time.shape, time.kind) == (shape.name, kind)]
        us = {(time.context, time.config): time.us for time in mine}
        first = {c: min((time for time in mine if time.context == c), key=lambda time: time.us) for c in CONTEXTS}
        lost = {time.config: sum(us[(c, time.config)] / first[c].us for c in CONTEXTS) for time in mine}
        chosen = best[(shape.name, kind)] = min(lost, key=lambda config: lost[config])
        for context, time in first.items():
            line = f"{shape.name:8}{kind:6}{context:7}  best {time.us:7.1f} us {time.tbs:5.2f} TB/s {time.config}"
            print(f"{line}; one for all {us[(context, chosen)]:7.1f} us", flush=True)
    return best


def refine(best: dict[tuple[str, str], DecodeConfig]) -> Iterator[dict[str, object]]:
    """Smallest splits at short contexts, and what the fixed splits of exact mode take."""
    for shape, kind in itertools.product(SHAPES, KINDS):
        for context in CONTEXTS:
            layers, config = Layers(shape, kind, context), best[(shape.name, kind)]
            entry = {"shape": shape.name, "kind": kind, "context": context}
            table = table_config(shape, kind)
            tried = {f"least {least}": replace(config, min_split_size=least) for least in MIN_SPLIT_SIZES}
            us = {name: layers.microseconds(one, layers.room()) for name, one in tried.items() if context < 32768}
            us["fixed splits"] = layers.microseconds(config, layers.room(True))
            us["the table's"] = layers.microseconds(table, SplitKV.allocate(*_sizes(shape, context)))
            print(f"{shape.name:8}{kind:6}{context:7}  " + ", ".join(f"{name} {t:.1f} us" for name, t in us.items()))
            yield {**entry, **us}
            torch.cuda.empty_cache()


def _sizes(shape: Shape, context: int) -> tuple[int, int, int, int, torch.device]:
    return ROWS, shape.num_heads, shape.head_dim, context + 2 * ROWS, torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description="configurations of the decode attention")
    parser.add_argument("--out", type=Path, help="a JSON file for all times")
    parser.add_argument("--quick", action="store_true", help="checks, and the table's configurations only")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), device_properties(torch.device("cuda", 0)))
    tasks = [(shape, kind, form) for shape in SHAPES for kind in KINDS for form in FORMS]
    if args.quick:
        tasks = [
            (shape, kind, (config.block_kv, config.num_warps, config.num_stages))
            for shape, kind in itertools.product(SHAPES, KINDS)
            for config in (table_config(shape, kind),)
        ]
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        fit = [task for task in pool.map(compiled, tasks, chunksize=2) if task]
    forms: dict[tuple[str, str], list[Form]] = {}
    for shape, kind, form in fit:
        forms.setdefault((shape.name, kind), []).append(form)
    found = checks()
    for name, passed in found.items():
        if not passed:
            print(f"FAILED  {name}")
    print(f"{sum(found.values())} of {len(found)} checks passed", flush=True)
    times = list(sweep(forms))
    best = report(times)
    refined = list(refine(best))
    for (name, kind), config in best.items():
        shape = next(shape for shape in SHAPES if shape.name == name)
        splits = config.programs_per_sm * device_properties(torch.device("cuda", 0)).num_sms // shape.num_kv_heads
        entry = f"({2 if kind == 'bf16' else 1}, {shape.head_dim}): {config}"
        print(f"CONFIGS, {kind}: {entry}; up to {splits} splits (MAX_SPLITS)")
    if args.out:
        every = [asdict(time) for time in times]
        args.out.write_text(json.dumps({"checks": found, "times": every, "refined": refined}, indent=1))
    raise SystemExit(0 if all(found.values()) else 1)


if __name__ == "__main__":
    main()
