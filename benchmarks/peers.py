"""How fast are we beside other programs on this machine? Random weights of true shapes, all in one run, by turns.

    PYTHONPATH=. python benchmarks/peers.py qwen3-8b --form int4 --llama-cpp SOURCES --out FILE.json

Every figure is wall time. *plain step*: of 512 tokens behind a prompt of 1,024. *cycle*: the same with a DFlash drafter
whose drafts are all made and verified, of which so many are accepted in each cycle (``--accepted``). *verify*: 512 rows
by so many at a time behind these 1,024, without sampling. *prompt* and *first token*: until the first token of a prompt
of 8,192 and of 1,024 is there. Each program runs once before anything counts, then all of them five times by turns;
medians and spreads are printed. Ratios are theirs by ours; one under 1.10 either way is ``level``.

Ours are sessions in this process: a target in our own layout, the same in strict mode, and the very GGUF file that
llama.cpp reads. Their *verify* keeps up the drafter's context as well. llama.cpp is built from its sources
(``--llama-cpp``), or found as ``--engine llama.cpp`` finds it (DFLASH_LLAMA_CPP, PATH). Its figures are those of
``llama-server``, steps and cycles by the server's own clock; ``--spec-synth-rates`` of it plants the acceptance. Its
*verify* is ``llama-bench -p 512 -d 1024 -b ROWS``, which computes logits of the last row alone: that favours it. vLLM
(DFLASH_VLLM, PATH) reads the files of our own layout; its clock is ours, its *verify* is not measured, and its
synthetic rejection sampling plants the acceptance, which its build for CPUs refuses. A mixture's experts follow from
ids, which are not the same on all sides. What is not installed or fails is a line that says so.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch

from benchmarks import random_gguf
from benchmarks.planted_regimes import SPREAD, Replies, equal_cycles
from benchmarks.random_checkpoint import Values, build
from dflash_local import child_process, settings
from dflash_local.app.resolve import Choice
from dflash_local.app.server_launch import launch, program_of
from dflash_local.bench.provenance import machine, versions
from dflash_local.catalog.bundled import Pair
from dflash_local.engine import LoadConfig, load
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.errors import DFlashError, MissingDependencyError, ServerError
from dflash_local.events import Mode, Step
from dflash_local.remote.endpoint import within
from dflash_local.remote.server_metrics import Unattributable, difference, read, read_settled
from dflash_local.request import Limits, Request

LEVEL = 1.10  # of clocks that differ, less says nothing
FORMS = {"int4": ("int4-g128", "q4_k_m"), "int8": ("int8-g128", "q8_0"), "bf16": (None, random_gguf.PLAIN)}
OWN = LAYOUT, STRICT, SAME_FILE = "own layout", "strict", "the same file"  # our rows
MEMORY = Path("/dev/shm")
PATIENCE_S = 600.0
TARGETS = ("llama-server", "llama-bench")
# Nothing that takes long to build and is not measured: pages, HTTPS, attention over coded keys, other cards.
CMAKE = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DGGML_CUDA_FA_ALL_QUANTS=OFF", "-DGGML_CUDA_NCCL=OFF"),
    *("-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_APP=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
)
# The whole model on the card, prompts in large batches, and no copies of replies that are over.
SERVER = (
    *("--gpu-layers", "all", "--fit", "off", "--flash-attn", "on"),
    *("--batch-size", "2048", "--ubatch-size", "2048", "--cache-ram", "0"),
)
# Random weights have no tokenizer. Each server takes its share of the card, beside all the others.
VLLM_SERVER = (
    *("--skip-tokenizer-init", "--no-enable-prefix-caching", "--dtype", "bfloat16"),
    *("--max-num-seqs", "8", "--gpu-memory-utilization", "0.25"),
)
Figures = dict[str, float]  # milliseconds


@dataclass(frozen=True, slots=True)
class Work:
    """What every program does: tokens of a reply and of the prompt before it, of the prompt that is measured, rows
    that are verified, drafts of a cycle and how many of them are accepted; ids that there are.
    """

    tokens: int
    prompt: int
    long: int
    rows: tuple[int, ...]
    drafts: int
    accepted: int
    vocabulary: int

    @property
    def context(self) -> int:
        """Tokens to make room for."""
        return max(self.long, self.prompt + self.tokens) + 4 * (self.drafts + 1)

    def ids(self, count: int) -> list[int]:
        """A prompt of so many tokens."""
        return [place * SPREAD % self.vocabulary for place in range(count)]


class Files(NamedTuple):
    """One pair, written twice: folders of ours, and GGUF files."""

    target: Path
    drafter: Path
    gguf: Path
    gguf_drafter: Path


class Program(Protocol):
    """A program with its weights in place. ``about``: its version, and how it was started."""

    about: dict[str, Any]

    def figures(self) -> Figures:
        """Do the work once. DFlashError: it failed."""
        ...


# Starts a program; the stack ends it. DFlashError: it is not installed, or does not start.
Peer = Callable[[Files, Work, ExitStack], Program]


def figures_of(plain: float, verify: Mapping[int, float], cycle: float, prompt: float, first: float) -> Figures:
    """Name milliseconds, in the order in which they are printed."""
    rows = {f"verify, {count} rows": ms for count, ms in verify.items()}
    return {"plain step": plain, **rows, "cycle": cycle, "prompt": prompt, "first token": first}


class Ours:
    """A session of the fused engine, whose drafts are planted."""

    def __init__(self, target: Path, drafter: Path, config: LoadConfig, work: Work, stack: ExitStack) -> None:
        self._work = work
        self._session = load(Pair("random", target, drafter, bundled=False), config)
        stack.callback(self._session.close)
        runner = self._session.runner
        assert isinstance(runner, FusedRunner)
        self._runner = runner
        planted = list(equal_cycles(work.accepted, work.drafts, work.tokens))
        with torch.inference_mode():
            for drafts in Replies(runner, len(planted))._planted:
                drafts.plant(planted)
        self.about = {"loaded_as": self._session.facts.loaded_as, "load": asdict(self._session.facts.load)}

    def figures(self) -> Figures:
        work = self._work
        plain, steps, _ = self._reply(work.prompt, work.tokens + 1, "ar")
        drafted, cycles, _ = self._reply(work.prompt, work.tokens + 1, "dflash")
        self.about["accepted"] = work.tokens / cycles - 1
        prompt, first = (self._reply(length, 1, "ar")[2] for length in (work.long, work.prompt))
        return figures_of(plain / steps, self._verify(), drafted / cycles, prompt, first)

    def _reply(self, prompt: int, tokens: int, mode: Mode) -> tuple[float, int, float]:
        """Milliseconds behind the first token, cycles, milliseconds until the first token."""
        self._session.reset()
        block = self._work.drafts + 1 if mode == "dflash" else None
        ids = tuple(self._work.ids(prompt))
        began, told, cycles = time.perf_counter(), list[float](), 0
        for event in self._session.generate(
            Request(prompt_ids=ids, mode=mode, block_size=block, limits=Limits(tokens))
        ):
            if isinstance(event, Step):
                told.append(time.perf_counter())
                cycles += event.rows > 0
        return 1e3 * (told[-1] - told[0]), cycles, 1e3 * (told[0] - began)

    @torch.inference_mode()
    def _verify(self) -> dict[int, float]:
        work, runner, found = self._work, self._runner, dict[int, float]()
        ids = work.ids(work.prompt + work.tokens // 2)  # as many as the rows look back on, in the mean
        bucket = runner.target.buckets.index(runner.target.bucket(len(ids) + 2 * runner.target.rows))
        self._session.reset()
        with runner.idle(ids):
            for rows in work.rows:
                runner.set_tokens(ids[:rows])
                runner.replay(rows, given=True, at=bucket)  # recorded, the first time
                count = -(-work.tokens // rows)
                self._wait()
                began = time.perf_counter()
                for _ in range(count):
                    runner.replay(rows, given=True, at=bucket)
                self._wait()
                found[rows] = 1e3 * (time.perf_counter() - began) / count
        return found

    def _wait(self) -> None:
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)


class LlamaCpp:
    """Two servers, one of which drafts, and ``llama-bench`` beside them."""

    def __init__(
        self, user: settings.Settings, flags: Sequence[str], files: Files, work: Work, stack: ExitStack
    ) -> None:
        server = program_of("llama.cpp", user)
        self._work, self._model, self._bench = work, files.gguf, server.with_name("llama-bench")
        rates = ",".join("1" if slot < work.accepted else "0" for slot in range(work.drafts))
        extra = ["--ctx-size", str(work.context), *SERVER, *flags]
        drafting = ["--spec-draft-ngl", "all", "--spec-draft-n-max", str(work.drafts), "--spec-synth-rates", rates]
        choice = Choice("random", files.gguf, files.gguf_drafter)
        self._plain = stack.enter_context(launch("llama.cpp", choice, user, False, extra))
        self._drafted = stack.enter_context(launch("llama.cpp", choice, user, True, [*extra, *drafting]))
        told = child_process.run([str(server), "--version"], capture_output=True, text=True)
        words = (told.stdout + told.stderr).splitlines()
        found = next((line for line in words if line.startswith("version: ")), "")
        self.about = {"version": found.removeprefix("version: "), "flags": extra, "drafting": drafting}

    def figures(self) -> Figures:
        work = self._work
        plain, _ = self._reply(self._plain, work.prompt, work.tokens + 1)
        drafted, _ = self._reply(self._drafted, work.prompt, work.tokens + 1)
        cycles = work.tokens - drafted["draft_n_accepted"]
        self.about |= {"accepted": drafted["draft_n_accepted"] / cycles, "drafted": drafted["draft_n"] / cycles}
        prompt, first = (self._reply(self._plain, length, 1)[1] for length in (work.long, work.prompt))
        step, cycle = plain["predicted_ms"] / work.tokens, drafted["predicted_ms"] / cycles
        return figures_of(step, self._verify(), cycle, prompt, first)

    def _reply(self, server: Any, prompt: int, tokens: int) -> tuple[dict[str, Any], float]:
        """The server's own figures, and milliseconds until its answer was here."""
        body = {"prompt": self._work.ids(prompt), "n_predict": tokens, "cache_prompt": False, "ignore_eos": True}
        body |= {"temperature": 0.0, "samplers": ["top_k"], "top_k": 1}  # the quickest way to the best token
        began = time.perf_counter()
        reply = server.endpoint.post("/completion", body, within(PATIENCE_S))
        ms = 1e3 * (time.perf_counter() - began)
        if reply is None or reply["timings"]["predicted_n"] != tokens:
            raise ServerError(f"llama-server did not write {tokens} tokens", f"its log: {server.log}")
        return reply["timings"], ms

    def _verify(self) -> dict[int, float]:
        work = self._work
        rows = ",".join(map(str, work.rows))
        words = ["-m", str(self._model), "-p", str(work.tokens), "-n", "0", "-d", str(work.prompt), "-b", rows]
        words += ["-ub", str(max(work.rows)), "-fa", "on", "-r", "1", "--no-warmup", "-o", "json"]
        told = child_process.run([str(self._bench), *words], capture_output=True, text=True)
        if told.returncode:
            raise ServerError(f"llama-bench ended with {told.returncode}: {told.stderr.strip()[-200:]}")
        spans = {each["n_batch"]: each["avg_ns"] / 1e6 for each in json.loads(told.stdout)}
        return {count: spans[count] / -(-work.tokens // count) for count in work.rows}


class VLLM:
    """Two servers, one of which drafts."""

    def __init__(
        self, user: settings.Settings, flags: Sequence[str], files: Files, work: Work, stack: ExitStack
    ) -> None:
        self._work = work
        rates = [float(slot < work.accepted) for slot in range(work.drafts)]
        drafting: dict[str, Any] = {"method": "dflash", "model": str(files.drafter)}
        drafting |= {"num_speculative_tokens": work.drafts, "rejection_sample_method": "synthetic"}
        words = ["--speculative-config", json.dumps(drafting | {"synthetic_acceptance_rates": rates})]
        extra = ["--max-model-len", str(work.context), *VLLM_SERVER, *flags]
        choice = Choice("random", files.target, files.drafter)
        self._plain = stack.enter_context(launch("vllm", choice, user, False, extra))
        self._drafted = stack.enter_context(launch("vllm", choice, user, True, [*extra, *words]))
        told = child_process.run([str(program_of("vllm", user)), "--version"], capture_output=True, text=True)
        self.about = {"version": told.stdout.strip(), "flags": extra, "drafting": words}

    def figures(self) -> Figures:
        work = self._work
        prompt, first = (self._reply_ms(self._plain, length, 1) for length in (work.long, work.prompt))
        plain = self._reply_ms(self._plain, work.prompt, work.tokens + 1) - first
        begun = self._reply_ms(self._drafted, work.prompt, 1)
        before = read(self._drafted.endpoint)
        drafted = self._reply_ms(self._drafted, work.prompt, work.tokens + 1) - begun
        try:
            found = difference(before, before and read_settled(self._drafted.endpoint, before))
        except Unattributable as error:
            raise ServerError(f"vLLM does not say what was accepted: {error}") from error
        self.about |= {"accepted": found.accepted / found.cycles, "drafted": found.drafted / found.cycles}
        return figures_of(plain / work.tokens, {}, drafted / found.cycles, prompt, first)

    def _reply_ms(self, server: Any, prompt: int, tokens: int) -> float:
        """Milliseconds until so many tokens were here."""
        body = {"model": "random", "prompt": self._work.ids(prompt), "max_tokens": tokens, "ignore_eos": True}
        began = time.perf_counter()
        reply = server.endpoint.post("/v1/completions", body | {"temperature": 0.0}, within(PATIENCE_S))
        ms = 1e3 * (time.perf_counter() - began)
        if reply is None or reply["usage"]["completion_tokens"] != tokens:
            raise ServerError(f"vLLM did not write {tokens} tokens", f"its log: {server.log}")
        return ms


def built_llama_cpp(sources: Path) -> Path:
    """Build what is measured of llama.cpp with CMake and Ninja, for this machine's card alone; return its server.

    ServerError: it does not build.
    """
    folder, card = sources / "build", []
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        card = ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={major}{minor}"]
    for argv in (
        ["cmake", "-G", "Ninja", "-S", str(sources), "-B", str(folder), *CMAKE, *card],
        ["cmake", "--build", str(folder), "--target", *TARGETS],
    ):
        told = child_process.run(argv, capture_output=True, text=True)
        if told.returncode:
            raise ServerError(f"llama.cpp does not build: {(told.stdout + told.stderr).strip()[-400:]}")
    return folder / "bin" / TARGETS[0]


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
    drafts = pair.config.block_size - 1
    rows = tuple(count for count in args.rows if count <= drafts + 1)
    return files, Work(args.tokens, args.prompt, args.long, rows, drafts, args.accepted, text["vocab_size"])


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
            try:
                there[name] = start(files, work, stack)
                there[name].figures()  # compiles, records
                rows[name] = {"about": there[name].about, "runs": []}
            except DFlashError as error:
                absent[name] = str(error)
            print(f"{name}: {absent.get(name, 'ready')}", flush=True)
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
        print(f"\n{name} {row['about'].get('version', '')}: {row['about']['accepted']:.2f} of {work.drafts} accepted")
        for figure, ms in row["median"].items():
            low, high = row["spread"][figure]
            speed = f", {1e3 * work.long / ms:,.0f} tokens/s" if figure == "prompt" else ""
            ratios = ", ".join(ratio(ms, rows[each]["median"][figure]) for each in mine if name not in own)
            print(f"  {figure:<16} {ms:9.3f} ms ({low:.3f} to {high:.3f}){speed}{'  ratios: ' * bool(ratios)}{ratios}")
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
    parser.add_argument("--accepted", type=int, default=3, help="drafts of a cycle")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--long", type=int, default=8192)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16])
    parser.add_argument("--layers", type=int, help="of the target, the last ones")
    parser.add_argument("--tiny", action="store_true", help="toy widths")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--at", type=Path, default=MEMORY if MEMORY.is_dir() else None, help="where weights lie")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    environ = settings.environment()
    if args.llama_cpp is not None:
        environ["DFLASH_LLAMA_CPP"] = str(built_llama_cpp(args.llama_cpp.absolute()))
    own = ours(args)
    if peers is None:
        user = settings.load(environ)
        peers = {"llama.cpp": partial(LlamaCpp, user, args.llama_flags.split())}
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
