"""The pair ``smollm2`` in llama.cpp on a CPU beside our reference engine: acceptance, texts and speed on equal prompts.

    PYTHONPATH=. python benchmarks/peer_llama_cpp.py LLAMA_CPP SMOLLM2.gguf --work FOLDER [--out FILE.json]

LLAMA_CPP: its source, built in ``build``. Its converter, which wants ``sentencepiece`` installed, makes a float32 file
of our drafter, its quantiser a float32 file of the target, so that the weights are the very same numbers; the target
also runs as it came. Prompts are given as our token ids, greedily, with caches in float32 and from cold caches. Besides
the drafter its own n-gram lookup runs, with drafts as long. Both programs take the same number of threads, and what
counts is their processor time, which other work on the machine changes little; with several threads waiting counts too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.llama_cpp_server import (
    CONTEXT,
    DFLASH,
    DRAFTER,
    PLAIN,
    Reply,
    ask,
    convert,
    cpu_seconds,
    modes,
    served,
)
from dflash_local.bench import provenance
from dflash_local.bench.prompts import Prompt, held_out
from dflash_local.bench.report import by_kind, number, table
from dflash_local.bench.trial import prompt_ids, write
from dflash_local.catalog.bundled import Pair
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.events import Mode
from dflash_local.request import Limits, Request

OURS = "dflash-local float32"
WARM_UP = 16  # tokens
TITLES = ("program, target, mode", "tokens", "per step", "per cycle", "tok/CPU s", "ratio", "as plain", "as ours")
Asked = tuple[str, tuple[int, ...]]  # kind and ids of a prompt


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one kind of prompt, or of all. ``per_step``: tokens a step; ``per_cycle``: accepted drafts + 1."""

    kind: str
    tokens: int
    per_step: float
    per_cycle: float | None
    per_position: tuple[float, ...]
    tokens_per_cpu_s: float


def own_reply(session: Session, kind: str, ids: tuple[int, ...], mode: Mode, tokens: int) -> Reply:
    """One greedy reply of our engine from cold caches."""
    process = psutil.Process()
    began = cpu_seconds(process)
    written = write(session, Request(prompt_ids=ids, limits=Limits(tokens), mode=mode))
    drafted = [cycle.accepted for cycle in written.cycles if cycle.drafted]
    kept = tuple(sum(one >= slot for one in drafted) for slot in range(1, max(drafted, default=0) + 1))
    return Reply(kind, written.ids, cpu_seconds(process) - began, len(written.cycles), len(drafted), sum(drafted), kept)


def row(kind: str, replies: Sequence[Reply]) -> Row:
    """The replies' figures together."""
    cycles, seconds = sum(one.cycles for one in replies), sum(one.cpu_s for one in replies)
    after = sum(len(one.ids) - 1 for one in replies)
    slots = range(max(len(one.per_position) for one in replies))
    kept = [sum(one.per_position[slot] for one in replies if slot < len(one.per_position)) for slot in slots]
    return Row(
        kind=kind,
        tokens=sum(len(one.ids) for one in replies),
        per_step=after / sum(one.steps for one in replies),
        per_cycle=1 + sum(one.accepted for one in replies) / cycles if cycles else None,
        per_position=tuple(count / cycles for count in kept) if cycles else (),
        tokens_per_cpu_s=sum(len(one.ids) for one in replies) / seconds,
    )


def run(args: argparse.Namespace, prompts: Sequence[Prompt]) -> dict[str, list[Reply]]:
    """Every prompt in our engine and in each form and mode of llama.cpp, by name of the run."""
    torch.set_num_threads(args.threads)
    session = load(
        Pair("smollm2", args.target, DRAFTER, bundled=False),
        LoadConfig(dtype="float32", device="cpu", engine="reference", context=CONTEXT),
    )
    block = session.facts.block_size
    asked = [(prompt.kind, prompt_ids(session, prompt, thinking=False)) for prompt in prompts]
    runs: dict[str, list[Reply]] = {}
    own_modes: dict[str, Mode] = {PLAIN: "ar", DFLASH: "dflash"}
    for name, own in own_modes.items():
        own_reply(session, "warm-up", asked[0][1], own, WARM_UP)
        runs[f"{OURS} {name}"] = [own_reply(session, *one, own, args.tokens) for one in _told(name, asked)]
    session.close()
    drafter, plain = convert(args.llama_cpp, args.target, args.work)
    for form, file in {"float32": plain, args.target.stem.rsplit(".", 1)[-1]: args.target}.items():
        for mode, options in modes(drafter, block).items():
            name = f"llama.cpp {form} {mode}"
            fixed = ["-m", str(file), "-t", str(args.threads), *options]
            with served(args.llama_cpp, fixed, args.work / "server.log") as server:
                ask(*server, "warm-up", asked[0][1], WARM_UP)
                runs[name] = [ask(*server, *one, args.tokens) for one in _told(name, asked)]
    return runs


def _told(what: str, asked: Sequence[Asked]) -> Iterator[Asked]:
    """The prompts, each named on the terminal as its turn comes."""
    for done, one in enumerate(asked, 1):
        print(f"\r{what}: prompt {done} of {len(asked)} ", end="", file=sys.stderr, flush=True)
        yield one


def equal(one: Sequence[Reply], other: Sequence[Reply]) -> list[tuple[Reply, Reply]]:
    """The replies to the same prompt with the same token ids."""
    return [(a, b) for a, b in zip(one, other, strict=True) if a.ids == b.ids]


def on_equal_texts(runs: Mapping[str, Sequence[Reply]]) -> dict[str, Any]:
    """Drafting with the same weights, over the replies whose texts are the same in both programs."""
    both = equal(runs[f"{OURS} {DFLASH}"], runs[f"llama.cpp float32 {DFLASH}"])
    ours, theirs = (row("", side) for side in zip(*both, strict=True))
    return {
        "replies": len(both),
        "of": len(runs[f"{OURS} {DFLASH}"]),
        "same_steps": sum(a.steps == b.steps for a, b in both),
        "tokens_per_step": [ours.per_step, theirs.per_step],
    }


def parting(one: Reply, other: Reply) -> int | None:
    """Where the token ids first differ; None where they are the same."""
    if one.ids == other.ids:
        return None
    pairs = zip(one.ids, other.ids, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one.ids), len(other.ids)))


def lines(runs: Mapping[str, Sequence[Reply]]) -> list[str]:
    """The table of all prompts, and tokens a step by kind."""
    cells, kinds = [], []
    heads = tuple(dict.fromkeys(one.kind for one in runs[f"{OURS} {PLAIN}"]))
    for name, replies in runs.items():
        rows = by_kind(replies, lambda one: one.kind, row)
        total = rows[-1]
        plain = runs[f"{name.rsplit(' ', 1)[0]} {PLAIN}"]
        speed = total.tokens_per_cpu_s
        ratio = speed / row("", plain).tokens_per_cpu_s
        figures = (f"{total.per_step:.3f}", number(total.per_cycle, 3), f"{speed:.1f}", f"{ratio:.2f}x")
        texts = tuple(f"{len(equal(replies, other))}/{len(replies)}" for other in (plain, runs[f"{OURS} {PLAIN}"]))
        cells.append((name, str(total.tokens), *figures, *texts))
        kinds.append((name, *(f"{one.per_step:.2f}" for one in rows[: len(heads)])))
    common = on_equal_texts(runs)
    ours, theirs = common["tokens_per_step"]
    return [
        *table(TITLES, cells),
        "",
        *table(("tokens a step", *heads), kinds),
        "",
        f"float32, drafted, the same text in both programs in {common['replies']} of {common['of']}: {ours:.3f} and "
        f"{theirs:.3f} tokens a step, as many steps in {common['same_steps']}",
    ]


def record(args: argparse.Namespace, runs: Mapping[str, Sequence[Reply]]) -> dict[str, Any]:
    """All that was measured, without the texts."""
    version = subprocess.run([args.llama_cpp / "build/bin/llama-server", "--version"], capture_output=True, text=True)
    ours = runs[f"{OURS} {PLAIN}"]
    return {
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "llama_cpp": version.stderr.split(" (")[0],  # a commit there may be another checkout's that it lies in
        "target": asdict(provenance.checkpoint_identity(args.target)),
        "drafter": asdict(provenance.checkpoint_identity(DRAFTER)),
        "threads": args.threads,
        "max_new_tokens": args.tokens,
        "on_equal_texts": on_equal_texts(runs),
        "runs": {
            name: {
                "rows": [asdict(one) for one in by_kind(replies, lambda one: one.kind, row)],
                "steps": [one.steps for one in replies],
                "tokens": [len(one.ids) for one in replies],
                "parts_from_ours_at": [parting(*both) for both in zip(replies, ours, strict=True)],
            }
            for name, replies in runs.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for converted files, 0.7 GB")
    parser.add_argument("--a-kind", type=int, default=6, help="held-out prompts of each kind")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--threads", type=int, default=1, help="llama.cpp's wait for each other: no more than free cores"
    )
    parser.add_argument("--out", type=Path, help="file of the JSON record")
    args = parser.parse_args(arguments)
    prompts = held_out(DRAFTER.parent / "heldout.json")
    kinds = dict.fromkeys(prompt.kind for prompt in prompts)
    chosen = [one for kind in kinds for one in [p for p in prompts if p.kind == kind][: args.a_kind]]
    runs = run(args, chosen)
    print("\n".join(lines(runs)))
    if args.out is not None:
        args.out.write_text(json.dumps(record(args, runs), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
