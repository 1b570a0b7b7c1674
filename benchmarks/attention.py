"""Cuts of the decode attention on one CUDA GPU: checks first, then every cut's time at four lengths, then the best.

``PYTHONPATH=. python benchmarks/attention.py [--out FILE.json] [--quick]``: under a minute of the GPU. Shapes are
Qwen3.5-9B's target (16 query heads, 4 key heads of width 256) and drafter (32, 8, 128) with blocks of 16 rows; numbers
are random. Prints microseconds of a layer and TB/s of the keys and values that it must read, and lines for
``CUTS`` in dflash_local/kernels/attention_cut.py. "bytes" is an eight-bit cache read as older cards read it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dflash_local.kernels.attention_cut import CUTS, Cut, card_of, fixed_pieces
from dflash_local.kernels.decode_attention import Pieces, Sight, decode_attention, decode_attention_twin
from dflash_local.kernels.jit import power_of_two
from dflash_local.kernels.timing import replay_ms

EIGHT = torch.float8_e4m3fn
KINDS = {"bf16": torch.bfloat16, "fp8": EIGHT, "bytes": torch.uint8}
Cache = tuple[torch.Tensor, torch.Tensor]
Form = tuple[int, int, int]  # step, warps, stages
ROWS = 16
CONTEXTS = (1024, 8192, 32768, 131072)
COLD = 128 << 20  # bytes of caches that are read in turn, so that none is found in the second-level cache
PROGRAMS, LEASTS = (1, 2, 4, 8), (32, 64, 128)
FORMS = (*itertools.product((32, 64), (4, 8), (2, 3, 4)), (128, 4, 2), (128, 8, 2))
WORKERS = 12  # compile at the same time


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of a layer. causal: a row is blind to later rows of its block."""

    name: str
    heads: int
    keys: int
    width: int
    causal: bool


SHAPES = (Shape("target", 16, 4, 256, True), Shape("drafter", 32, 8, 128, False))


@dataclass(frozen=True, slots=True)
class Time:
    """A cut's time of one layer."""

    shape: str
    kind: str
    context: int
    cut: Cut
    us: float
    tbs: float


def table_cut(shape: Shape, kind: str) -> Cut:
    """The one that is entered."""
    return CUTS[(2 if kind == "bf16" else 1, shape.width)]


class Layers:
    """Caches of one kind and length, as many as it takes to find none of them warm."""

    def __init__(self, shape: Shape, kind: str, context: int, least: int = COLD) -> None:
        self.shape, self.context, dtype = shape, context, KINDS[kind]
        room = context + 2 * ROWS
        size = 1 if kind != "bf16" else 2
        self.bytes = 2 * shape.keys * (context + ROWS) * shape.width * size
        count = max(math.ceil(least / self.bytes), 1)
        self.reach = power_of_two(context + ROWS)
        one = torch.randn(shape.keys, room, shape.width, device="cuda", dtype=torch.bfloat16)
        one = one if kind == "bf16" else one.to(EIGHT).view(dtype)
        self.caches = [(one.clone(), one.clone()) for _ in range(count)]
        self.queries = torch.randn(ROWS, shape.heads, shape.width, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(ROWS, shape.heads * shape.width, device="cuda", dtype=torch.bfloat16)
        self.start = torch.tensor([context], dtype=torch.int32, device="cuda")

    def room(self, fixed: bool = False) -> Pieces:
        """For the pieces of any cut that is tried."""
        count = fixed_pieces(self.reach) if fixed else 512
        sums = torch.empty(count, ROWS, self.shape.heads, self.shape.width, device="cuda")
        return Pieces(sums, torch.empty(count, ROWS, self.shape.heads, 2, device="cuda"), fixed)

    def work(self, cut: Cut, pieces: Pieces) -> Callable[[], None]:
        """Every layer once."""
        sight = Sight(causal=self.shape.causal)

        def run() -> None:
            for cache in self.caches:
                decode_attention(self.queries, cache, self.start, self.out, pieces, self.reach, sight, cut=cut)

        return run

    def microseconds(self, cut: Cut, pieces: Pieces) -> float:
        """Of a layer, launches left out."""
        return replay_ms(self.work(cut, pieces), 5) * 1000 / len(self.caches)


def checks() -> dict[str, bool]:
    """What the interpreter cannot say of a card: codes, the twin, a row's bits."""
    found = codes()
    for shape, kind in itertools.product(SHAPES, KINDS):
        torch.manual_seed(0)
        layers = Layers(shape, kind, 5000, 1)
        for name, passed in of_layers(layers, kind).items():
            found[f"{shape.name} {kind}: {name}"] = passed
    return found


def of_layers(layers: Layers, kind: str) -> dict[str, bool]:
    """One layer beside its twin and its widened cache; its rows at other indices, among others."""
    fixed, cache, queries = layers.room(True), layers.caches[0], layers.queries
    real = (cache[0].view(EIGHT), cache[1].view(EIGHT)) if kind == "bytes" else cache
    cut, sight = table_cut(layers.shape, kind), Sight(causal=layers.shape.causal)

    def run(rows: torch.Tensor, over: Cache, start: int, room: Pieces, reach: int, see: Sight) -> torch.Tensor:
        at, out = torch.full_like(layers.start, start), torch.empty_like(layers.out)
        return decode_attention(rows, over, at, out, room, reach, see, cut=cut)

    ours = run(queries, cache, layers.context, layers.room(), layers.reach, sight)
    want = decode_attention_twin(queries, real, layers.start, torch.empty_like(layers.out), sight)
    found = {"near the twin": bool(((ours - want).abs() <= 2**-7 * want.abs().max()).all())}
    wide = (real[0].bfloat16(), real[1].bfloat16())
    one, two = (run(queries, over, 4990, fixed, 8192, Sight()) for over in (cache, wide))
    found["as the widened cache"] = bool(((one - two).abs() < 1e-3).all())
    for start, index in ((4096, 3), (4093, 3), (4900, 15), (4999, 7)):
        others, later = torch.randn_like(queries), (cache[0].clone(), cache[1].clone())
        others[0] = queries[index]
        behind = start + index + 1
        for part in later:
            part[:, behind:] = part[:, : part.shape[1] - behind].clone()
        rows = run(queries, cache, start, fixed, 8192, Sight())
        moved = run(others, later, start + index, fixed, 6000, Sight())
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
        pieces = Pieces.for_(ROWS, 16, 256, 32, out.device)
        decode_attention(
            queries,
            (torch.zeros_like(every).expand(4, 32, 256).contiguous().view(values.dtype), values),
            start,
            out,
            pieces,
            32,
            Sight(),
            cut=Cut(),
        )
        found[f"{kind}: every code"] = torch.equal(out.view(-1, 256)[0], every.view(EIGHT).to(out.dtype))
    return found


def compiled(task: tuple[Shape, str, Form]) -> tuple[Shape, str, Form] | None:
    """Compile one form into the disk cache; None where the card has no room for it."""
    shape, kind, form = task
    layers = Layers(shape, kind, 64, 1)
    cut = Cut(*form, least=128)
    try:
        layers.work(cut, layers.room())()
        if form == (table_cut(shape, kind).step, table_cut(shape, kind).warps, table_cut(shape, kind).stages):
            layers.work(cut, layers.room(True))()
        torch.cuda.synchronize()
    except Exception as error:  # whatever Triton says of a form that does not fit
        print(f"left out: {shape.name} {kind} {form}: {str(error).splitlines()[0][:90]}")
        return None
    return task


def sweep(forms: dict[tuple[str, str], list[Form]]) -> Iterator[Time]:
    """Times of every form and number of programs."""
    for shape, kind, context in itertools.product(SHAPES, KINDS, CONTEXTS):
        layers = Layers(shape, kind, context)
        pieces = layers.room()
        for form, programs in itertools.product(forms[(shape.name, kind)], PROGRAMS):
            cut = Cut(*form, programs=programs, least=128)
            us = layers.microseconds(cut, pieces)
            yield Time(shape.name, kind, context, cut, us, layers.bytes / us / 1e6)
        torch.cuda.empty_cache()


def report(times: list[Time]) -> dict[tuple[str, str], Cut]:
    """Prints each length's best; gives the cut that loses least over all lengths."""
    best: dict[tuple[str, str], Cut] = {}
    for shape, kind in itertools.product(SHAPES, KINDS):
        mine = [time for time in times if (time.shape, time.kind) == (shape.name, kind)]
        us = {(time.context, time.cut): time.us for time in mine}
        first = {c: min((time for time in mine if time.context == c), key=lambda time: time.us) for c in CONTEXTS}
        lost = {time.cut: sum(us[(c, time.cut)] / first[c].us for c in CONTEXTS) for time in mine}
        chosen = best[(shape.name, kind)] = min(lost, key=lambda cut: lost[cut])
        for context, time in first.items():
            line = f"{shape.name:8}{kind:6}{context:7}  best {time.us:7.1f} us {time.tbs:5.2f} TB/s {time.cut}"
            print(f"{line}; one cut for all {us[(context, chosen)]:7.1f} us", flush=True)
    return best


def refine(best: dict[tuple[str, str], Cut]) -> Iterator[dict[str, object]]:
    """Smallest pieces at short contexts, and what the fixed cut of exact mode takes."""
    for shape, kind in itertools.product(SHAPES, KINDS):
        for context in CONTEXTS:
            layers, cut = Layers(shape, kind, context), best[(shape.name, kind)]
            entry = {"shape": shape.name, "kind": kind, "context": context}
            table = table_cut(shape, kind)
            tried = {f"least {least}": Cut(cut.step, cut.warps, cut.stages, cut.programs, least) for least in LEASTS}
            us = {name: layers.microseconds(one, layers.room()) for name, one in tried.items() if context < 32768}
            us["fixed cut"] = layers.microseconds(cut, layers.room(True))
            us["the table's"] = layers.microseconds(table, Pieces.for_(*_sizes(shape, context)))
            print(f"{shape.name:8}{kind:6}{context:7}  " + ", ".join(f"{name} {t:.1f} us" for name, t in us.items()))
            yield {**entry, **us}
            torch.cuda.empty_cache()


def _sizes(shape: Shape, context: int) -> tuple[int, int, int, int, torch.device]:
    return ROWS, shape.heads, shape.width, context + 2 * ROWS, torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description="cuts of the decode attention")
    parser.add_argument("--out", type=Path, help="a JSON file for all times")
    parser.add_argument("--quick", action="store_true", help="checks, and the table's cuts only")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), card_of(torch.device("cuda", 0)))
    tasks = [(shape, kind, form) for shape in SHAPES for kind in KINDS for form in FORMS]
    if options.quick:
        tasks = [
            (shape, kind, (cut.step, cut.warps, cut.stages))
            for shape, kind in itertools.product(SHAPES, KINDS)
            for cut in (table_cut(shape, kind),)
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
    for (name, kind), cut in best.items():
        shape = next(shape for shape in SHAPES if shape.name == name)
        pieces = cut.programs * card_of(torch.device("cuda", 0)).processors // shape.keys
        print(f"CUTS, {kind}: ({2 if kind == 'bf16' else 1}, {shape.width}): {cut}; up to {pieces} pieces (PIECES)")
    if options.out:
        every = [asdict(time) for time in times]
        options.out.write_text(json.dumps({"checks": found, "times": every, "refined": refined}, indent=1))
    raise SystemExit(0 if all(found.values()) else 1)


if __name__ == "__main__":
    main()
