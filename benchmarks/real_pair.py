"""The pair ``smollm2`` over its held-out prompts on one card: speed in every form, fidelity, certificates.

    PYTHONPATH=. python benchmarks/real_pair.py SMOLLM2.gguf speed fidelity methods certify [--out FILE.json]

Forms: the file's own codes, and its weights decoded to bfloat16 (written to a folder first), alone and rounded as
``--quantize`` rounds them. *speed*: what ``dflash bench`` measures of each form, with and without ``--exact``.
*fidelity*: what ``dflash bench --fidelity`` measures of each form, against transformers' own modules in float32 over
the decoded weights (the reference engine). *methods*: tokens/s of the plain step, the drafter and copies of the text,
each alone, and of the scheduler over all of them, by kind of prompt and in a chat of 20 turns about a file. *certify*:
what ``dflash certify`` runs, over all held-out prompts; *certify-exact*: the same with ``--exact``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_local.bench import fidelity, provenance, speed
from dflash_local.bench.certificate import presented
from dflash_local.bench.certify import CertifyPlan, cases, certify
from dflash_local.bench.prompts import Prompt, held_out
from dflash_local.bench.report import finite
from dflash_local.bench.trial import Written, go_on, prompt_ids, write
from dflash_local.catalog.bundled import Pair
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.engine.drafter_choice import Chosen, DrafterChoice
from dflash_local.engine.scheduler import Scheduler
from dflash_local.events import Mode
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.load_target import load_target, placement
from dflash_local.models.target_facts import TargetFacts
from dflash_local.request import Limits, Message, Request, SamplingParams

FOLDER = Path(__file__).resolve().parents[1] / "dflash_local" / "demo" / "smollm2"
DRAFTER, HELD_OUT = FOLDER / "drafter", FOLDER / "heldout.json"
CONTEXT, AGENT_CONTEXT = 1024, 8192
SEED = 1
TURNS, TURN_LINES = 20, 12  # of the chat about a file
METHODS = {"plain": (False, False), "drafter": (True, False), "copies": (False, True), "all": (True, True)}


@dataclass(frozen=True, slots=True)
class Form:
    """How the target is held and what is asked of it. ``codes``: as the file holds it, else decoded to bfloat16."""

    name: str
    codes: bool = False
    quantize: str | None = None
    block: int | None = None
    sampling: SamplingParams = SamplingParams()


CODES = Form("Q4_1 codes", codes=True)
PLAIN = Form("bfloat16")
FORMS = (
    CODES,
    Form("Q4_1 codes, block 4", codes=True, block=4),
    Form("Q4_1 codes, T 0.7", codes=True, sampling=SamplingParams(temperature=0.7, seed=SEED)),
    PLAIN,
    Form("fp8", quantize="fp8"),
    Form("int8", quantize="int8"),
    Form("int4", quantize="int4"),
)


def write_decoded(file: Path, folder: Path) -> None:
    """A GGUF target as a folder of bfloat16 safetensors with its tokenizer."""
    files = Checkpoint.open(file)
    parts = files.source.tokenizer()
    if parts is None:
        raise SystemExit(f"{file} has no tokenizer")
    load_target(files, TargetFacts.from_checkpoint(files), placement("cpu", "bfloat16")).save_pretrained(folder)
    told = {
        "generation_config.json": files.source.generation_config(),
        "tokenizer.json": parts.spec,
        "tokenizer_config.json": {**parts.config, "chat_template": parts.template},
    }
    for name, values in told.items():
        (folder / name).write_text(json.dumps(values), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Target:
    """The file and the folder that it was decoded to; ``device``: where it runs."""

    file: Path
    decoded: Path
    device: str

    def pair(self, form: Form) -> Pair:
        return Pair("smollm2", self.file if form.codes else self.decoded, DRAFTER, bundled=False)

    @contextmanager
    def session(self, form: Form, **options: Any) -> Iterator[Session]:
        """Load the pair, and give the memory back in the end. ``options``: of LoadConfig."""
        fixed = LoadConfig(device=self.device, context=CONTEXT, quantize=form.quantize, skip_check=True)
        session = load(self.pair(form), replace(fixed, **options))
        try:
            yield session
        finally:
            session.close()
            del session
            fidelity.give_back()


def tell(text: str, done: float = 0.0) -> None:
    print(f"\r{text}, {done:.0%}  ", end="", file=sys.stderr, flush=True)


def show(title: str, lines: Sequence[str]) -> None:
    print("\n".join(["", title, *lines]), flush=True)


def kinds(prompts: Sequence[Prompt], each: int) -> list[Prompt]:
    """The first so many prompts of each kind."""
    taken: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        taken.setdefault(prompt.kind, []).append(prompt)
    return [prompt for rows in taken.values() for prompt in rows[:each]]


def measure_speed(target: Target, prompts: Sequence[Prompt], few: int, tokens: int) -> dict[str, Any]:
    """Rows of every form by kind; all prompts in the first, ``few`` of each kind in the others."""
    found: dict[str, Any] = {}
    for form in FORMS:
        chosen = prompts if form is CODES else kinds(prompts, few)
        options = speed.SpeedOptions(tokens, form.block, sampling=form.sampling)
        found[form.name] = {}
        for mode, exact in (("fast", False), ("exact", True)):
            with target.session(form, exact=exact) as session:
                compared = speed.compare(session, chosen, options, tell)
                report, lines = speed.presented(target.pair(form), session.facts, compared, options)
                stored = session.facts.stored
            show(f"{form.name}, {mode}", lines)
            found[form.name][mode] = {"rows": report["rows"], "stored": stored}
    return found


def measure_fidelity(target: Target, prompts: Sequence[Prompt], tokens: int) -> dict[str, Any]:
    """Each form's distance from transformers in float32, over the replies of these."""
    with target.session(PLAIN, draft=False, engine="reference", dtype="float32") as session:
        texts = fidelity.score_original(session, prompts, tokens, False, tell)
        before = session.facts
    found: dict[str, Any] = {}
    forms = [form for form in FORMS if form.block is None and form.sampling.greedy]
    for name, form, dtype in [("float32", PLAIN, "float32"), *((form.name, form, "auto") for form in forms)]:
        with target.session(form, draft=False, dtype=dtype) as session:
            distances = fidelity.distances(session, texts, tell)
            pairs = target.pair(form), session.facts, target.pair(PLAIN), before
            report, lines = fidelity.presented(*pairs, texts, distances)
        show(name, lines)
        found[name] = report["rows"]
    return found


class NoDrafter(DrafterChoice):
    """Every cycle that copies nothing is a plain step."""

    def next(self) -> Chosen:
        self.drafts = False
        return Chosen(0, 1)


@contextmanager
def methods(session: Session, drafter: bool, copies: bool) -> Iterator[None]:
    """Schedulers choose among these and the plain step within."""
    begin = Scheduler.begin

    def begin_narrowed(self: Scheduler, kind: str) -> None:
        self._copied = self._copied if copies else None
        if not drafter:
            self._choices = {each: NoDrafter(choice.controls) for each, choice in self._choices.items()}
        begin(self, kind)

    session.schedulers.clear()
    Scheduler.begin = begin_narrowed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Scheduler.begin = begin  # type: ignore[method-assign]
        session.schedulers.clear()


def tokens_per_s(replies: Iterable[Written]) -> float:
    """Of decoding, the first token of each reply left out."""
    known = list(replies)
    return sum(len(each.ids) - 1 for each in known) / sum(each.stats.decode_s for each in known)


def turns(session: Session, request: Request) -> Iterator[Written]:
    """A chat of 20 turns, each about the next lines of this file."""
    lines, said = Path(__file__).read_text(encoding="utf-8").splitlines(), list[Message]()
    session.reset()
    for turn in range(TURNS):
        part = "\n".join(lines[turn * TURN_LINES : (turn + 1) * TURN_LINES])
        said.append(Message("user", f"Write these lines of a file again.\n```python\n{part}\n```"))
        reply = go_on(session, replace(request, messages=tuple(said)))
        said.append(Message("assistant", reply.text))
        yield reply


def answered(session: Session, request: Request, texts: Sequence[str]) -> Iterator[Written]:
    """Replies to these; without any those of ``turns``."""
    if not texts:
        yield from turns(session, request)
    for text in texts:
        yield write(session, replace(request, messages=(Message("user", text),)))


def measure_methods(target: Target, prompts: Sequence[Prompt], tokens: int) -> dict[str, Any]:
    """Rows by kind; the first pass over each is not timed."""
    found: dict[str, Any] = {}
    with target.session(CODES, context=AGENT_CONTEXT) as session:
        for kind in ["agent", *dict.fromkeys(prompt.kind for prompt in prompts)]:
            texts, row = [prompt.text for prompt in prompts if prompt.kind == kind], dict[str, float]()
            for name, (drafter, copies) in METHODS.items():
                mode: Mode = "dflash" if drafter or copies else "ar"
                request = Request(messages=(Message("user", "."),), limits=Limits(tokens), mode=mode)
                with methods(session, drafter, copies):
                    tokens_per_s(answered(session, request, texts))
                    row[name] = tokens_per_s(answered(session, request, texts))
            best = max(speed for name, speed in row.items() if name != "all")
            found[kind] = row | {"all_over_best": row["all"] / best, "all_over_drafter": row["all"] / row["drafter"]}
            show(kind, [", ".join(f"{name} {value:.4g}" for name, value in found[kind].items())])
    return found


def certify_all(target: Target, prompts: Sequence[Prompt], tokens: int, exact: bool) -> dict[str, Any]:
    with target.session(CODES, exact=exact) as session:
        ids = tuple(prompt_ids(session, prompt, False) for prompt in prompts)
        plan = CertifyPlan(ids, cases(SEED), (session.facts.block_size,), tokens)
        one = certify(session, plan, tell)
        report, lines = presented(target.pair(CODES), session.facts, prompts, plan, SEED, one)
    show("certificate", lines[-1:])
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("what", nargs="+", choices=("speed", "fidelity", "methods", "certify", "certify-exact"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--few", type=int, default=8, help="prompts of each kind for all forms but the first")
    parser.add_argument("--limit", type=int, help="prompts of each kind for everything")
    parser.add_argument("--tokens", type=int, default=128, help="of a reply at most")
    parser.add_argument("--certified-tokens", type=int, default=64, help="the same of a certificate")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prompts = held_out(HELD_OUT)
    prompts = prompts if args.limit is None else tuple(kinds(prompts, args.limit))
    found: dict[str, Any] = {"machine": provenance.machine(), "versions": provenance.versions(), "tokens": args.tokens}
    with tempfile.TemporaryDirectory(prefix="real-pair-") as folder:
        target = Target(args.target, Path(folder), args.device)
        write_decoded(args.target, target.decoded)
        for name in args.what:
            if name == "speed":
                found[name] = measure_speed(target, prompts, args.few, args.tokens)
            elif name == "methods":
                found[name] = measure_methods(target, prompts, args.tokens)
            elif name == "fidelity":
                found[name] = measure_fidelity(target, kinds(prompts, args.few), args.tokens)
            else:
                found[name] = certify_all(target, prompts, args.certified_tokens, name == "certify-exact")
            if args.out is not None:
                args.out.write_text(json.dumps(finite(found), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
