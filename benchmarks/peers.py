"""How fast are we beside other programs on this machine? Random weights of true shapes, all in one run, by turns.

    PYTHONPATH=. python benchmarks/peers.py qwen3-8b --form int4 --llama-cpp SOURCES --out FILE.json

Every figure is wall time. *plain step*: of 512 tokens behind a prompt of 1,024. *drafted token*: the same with drafts,
each program at the number of drafts a cycle that suits it best of those tried. How many are accepted is planted: all of
the first N with a probability of ``--rate`` to the power of N. A cycle's time is measured, its tokens are the mean that
these probabilities have. *verify*: 512 rows by so many at a time behind these 1,024, without sampling. *prompt* and
*first token*: until the first token of a prompt of 8,192 and of 1,024 is there. Each program runs once before anything
counts, then all of them five times by turns; medians and spreads are printed. Ratios are theirs by ours; one under 1.10
either way is ``level``.

Ours are sessions in this process: a target in our own layout, the same in strict mode, and the very GGUF file that
llama.cpp reads. Their *verify* keeps up the drafter's context as well. llama.cpp is built from its sources
(``--llama-cpp``), or found as ``--engine llama.cpp`` finds it (DFLASH_LLAMA_CPP, PATH). Its figures are those of
``llama-server``, steps and cycles by the server's own clock, with DFlash and, where the target has the layer for it,
with MTP; ``--spec-synth-rates`` plants the acceptance. Its *verify* is ``llama-bench -p 512 -d 1024 -b ROWS``, which
computes logits of the last row alone: that favours it. vLLM (DFLASH_VLLM, PATH) reads the files of our own layout and
drafts whole blocks; its clock is ours, its *verify* is not measured, and its synthetic rejection sampling plants the
acceptance, which its build for CPUs refuses. A mixture's experts follow from ids, which are not the same on all sides.
What is not installed or fails is a line that says so.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import random_gguf
from benchmarks.peer_programs import VLLM, Files, LlamaCpp, LlamaCppDrafting, Ours, Program, Work, built_llama_cpp
from benchmarks.random_checkpoint import Values, add_place, add_shape, build, named_pair
from dflash_local import child_process, settings
from dflash_local.bench.provenance import machine, versions
from dflash_local.engine import LoadConfig
from dflash_local.errors import DFlashError, MissingDependencyError

LEVEL = 1.10  # of clocks that differ, less says nothing
FORMS = {"int4": ("int4-g128", "q4_k_m"), "int8": ("int8-g128", "q8_0"), "bf16": (None, random_gguf.PLAIN)}
OWN = LAYOUT, STRICT, SAME_FILE = "own layout", "strict", "the same file"  # our rows
# Starts a program; the stack ends it. DFlashError: it is not installed, or does not start.
Peer = Callable[[Files, Work, ExitStack], Program]


def not_measured(name: str, _files: Files, _work: Work, _stack: ExitStack) -> Program:
    """A program that is looked for, as a module or on PATH, and that nothing here measures yet."""
    if find_spec(name) is None and child_process.find_program(name) is None:
        raise MissingDependencyError("not installed")
    try:
        found = version(name)
    except PackageNotFoundError:
        found = "of unknown version"
    raise MissingDependencyError(f"installed ({found}), and not measured here yet")


OTHERS = {"SGLang": "sglang", "exllamav3": "exllamav3", "TensorRT-LLM": "tensorrt_llm"}
OTHERS |= {"ik_llama.cpp": "ik-llama-server"}


def written(args: argparse.Namespace, folder: Path) -> tuple[Files, Work]:
    """Write the pair in the two ways; return what is to be done with it as well."""
    stored, gguf = FORMS[args.form]
    shape = {"layers": args.layers, "tiny": args.tiny, "device": args.device}
    pair = build(args.pair, folder / "ours", stored=stored, tiled=True, **shape)
    build(args.pair, folder / "theirs", stored=args.gguf or gguf, **shape)
    files = Files(*(folder / name for name in ("ours/target", "ours/drafter", "target.gguf", "drafter.gguf")))
    (folder / "theirs" / "target").rename(files.gguf)
    text = pair.target_config.get("text_config") or pair.target_config
    values = Values(torch.Generator(args.device).manual_seed(2), text["num_hidden_layers"], 1.0)
    dtype = "BF16" if stored is None else "Q8_0"
    random_gguf.write_drafter(files.gguf_drafter, pair.drafter_config, text, dtype, values)
    block = pair.config.block_size
    rows = tuple(count for count in args.rows if count <= block)
    drafts = tuple(sorted({min(count, block - 1) for count in args.drafts}))
    return files, Work(args.tokens, args.prompt, args.long, rows, drafts, args.rate, text["vocab_size"])


def ours(args: argparse.Namespace) -> dict[str, Peer]:
    """Our own rows."""
    stored, gguf = FORMS[args.form]
    same = {"engine": "fused", "device": args.device}

    def session(kind: str, files: Files, work: Work, stack: ExitStack) -> Program:
        # Its drafter has the bits that the GGUF drafter has.
        precision = "8bit" if stored is not None and kind != SAME_FILE else "full"
        config = LoadConfig(**same, context=work.context, exact=kind == STRICT, drafter_precision=precision)
        pair = (files.gguf, files.gguf_drafter) if kind == SAME_FILE else (files.target, files.drafter)
        return Ours(*pair, config, work, stack)

    formats = {LAYOUT: stored or "bf16", STRICT: stored or "bf16", SAME_FILE: args.gguf or gguf}
    return {f"ours, {formats[kind]}, {kind}": partial(session, kind) for kind in OWN}


def measure(peers: dict[str, Peer], files: Files, work: Work, runs: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Rows by name, each with its runs; and why others are none."""
    rows: dict[str, Any] = {}
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        there: dict[str, Program] = {}
        for name, start in peers.items():
            began = time.monotonic()
            try:
                there[name] = start(files, work, stack)
                there[name].figures()  # compiles, records
                rows[name] = {"about": there[name].about, "runs": []}
            except DFlashError as error:
                absent[name] = str(error)
            print(f"{name}: {absent.get(name) or f'ready after {time.monotonic() - began:.0f} s'}", flush=True)
        for _ in range(runs):
            for name in list(rows):
                try:
                    rows[name]["runs"].append(there[name].figures())
                except DFlashError as error:
                    absent[name] = str(error)
                    del rows[name]
    for row in rows.values():
        each = {figure: sorted(run[figure] for run in row["runs"]) for figure in row["runs"][0]}
        row["median"] = {figure: median(spans) for figure, spans in each.items()}
        row["spread"] = {figure: (spans[0], spans[-1]) for figure, spans in each.items()}
    return rows, absent


def ratio(theirs: float, own: float) -> str:
    """Say how many times as long as ours theirs is."""
    found = theirs / own
    return "level" if 1 / LEVEL < found < LEVEL else f"{found:.2f}"


def tell(rows: dict[str, Any], absent: dict[str, str], work: Work, own: Sequence[str]) -> None:
    """Print medians with spreads, and the ratios of every other program to each row of ours."""
    mine = [name for name in own if name in rows]
    print(f"\nratios are to: {'; '.join(mine)}")
    for name, row in rows.items():
        print(f"\n{name} {row['about'].get('version', '')}")
        for figure, ms in row["median"].items():
            low, high = row["spread"][figure]
            speed = f", {1e3 * work.long / ms:,.0f} tokens/s" if figure == "prompt" else ""
            ratios = ", ".join(ratio(ms, rows[each]["median"][figure]) for each in mine if name not in own)
            print(f"  {figure:<16} {ms:9.3f} ms ({low:.3f} to {high:.3f}){speed}{'  ratios: ' * bool(ratios)}{ratios}")
        for drafts, found in row["about"].get("tried", {}).items():
            best = ", the best" * (drafts == row["about"]["drafts"])
            print(f"  a cycle of {drafts} drafts {found['cycle_ms']:.3f} ms, {found['accepted']:.2f} accepted{best}")
    for name, why in absent.items():
        print(f"\n{name}: {why}")


def main(arguments: Sequence[str] | None = None, peers: dict[str, Peer] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", help="a name of the registry")
    parser.add_argument("--form", choices=FORMS, default="int4")
    parser.add_argument("--gguf", choices=random_gguf.FORMATS, help="another type of the GGUF file than the form's")
    parser.add_argument("--llama-cpp", type=Path, metavar="SOURCES", help="a folder of its sources, which is built")
    parser.add_argument("--llama-flags", default="", help="more flags of llama-server, in one word")
    parser.add_argument("--vllm-flags", default="", help="the same of vLLM's server")
    parser.add_argument("--rate", type=float, default=0.75, help="of drafts behind accepted ones that are accepted")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 7, 15], help="numbers of them that are tried")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--long", type=int, default=8192)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16])
    add_shape(parser)
    add_place(parser)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    environ = settings.environment()
    if args.llama_cpp is not None:
        environ["DFLASH_LLAMA_CPP"] = str(built_llama_cpp(args.llama_cpp.absolute()))
    own = ours(args)
    if peers is None:
        user = settings.load(environ)
        flags, config = args.llama_flags.split(), named_pair(args.pair).target_config
        peers = {"llama.cpp": partial(LlamaCpp, user, flags)}
        peers |= {"llama.cpp, DFlash": partial(LlamaCppDrafting, user, flags, True, ())}
        if config.get("text_config", config).get("mtp_num_hidden_layers"):
            peers |= {"llama.cpp, MTP": partial(LlamaCppDrafting, user, flags, False, ("--spec-type", "draft-mtp"))}
        peers |= {"vLLM": partial(VLLM, user, args.vllm_flags.split())}
        peers |= {name: partial(not_measured, module) for name, module in OTHERS.items()}
    with tempfile.TemporaryDirectory(prefix="peers-", dir=args.at) as folder:
        files, work = written(args, Path(folder))
        found, absent = measure(own | peers, files, work, args.runs)
    tell(found, absent, work, list(own))
    if args.out is not None:
        record = {"what": "random weights of true shapes, wall times in milliseconds", "pair": args.pair}
        record |= {"form": args.form, "gguf": args.gguf or FORMS[args.form][1], "work": asdict(work), "rows": found}
        record |= {"absent": absent, "machine": machine(), "versions": versions()}
        args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
