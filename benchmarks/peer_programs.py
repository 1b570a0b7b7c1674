"""Programs that ``peers.py`` measures, each with its weights in place: ours, llama.cpp and vLLM."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from benchmarks.planted_regimes import SPREAD, PlantedCycle, Replies
from dflash_local import child_process, settings
from dflash_local.app.resolve import Choice
from dflash_local.app.server_launch import launch, program_of
from dflash_local.catalog.bundled import Pair
from dflash_local.engine import LoadConfig, load
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.errors import DFlashError, ServerError
from dflash_local.events import Step
from dflash_local.remote.endpoint import within
from dflash_local.remote.server_metrics import Unattributable, difference, read, read_settled
from dflash_local.remote.server_process import ServerProcess
from dflash_local.request import Limits, Request

PATIENCE_S, GONE_S = 600.0, 5.0
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
    that are verified, numbers of drafts that are tried, the probability that a draft behind accepted ones is accepted;
    ids that there are.
    """

    tokens: int
    prompt: int
    long: int
    rows: tuple[int, ...]
    drafts: tuple[int, ...]
    rate: float
    vocabulary: int

    @property
    def context(self) -> int:
        """Tokens to make room for."""
        return max(self.long, self.prompt + self.tokens) + 4 * (max(self.drafts) + 1)

    def ids(self, count: int) -> list[int]:
        """A prompt of so many tokens."""
        return [place * SPREAD % self.vocabulary for place in range(count)]

    def rates(self, drafts: int) -> list[float]:
        """The probability that a draft and all before it are accepted, by position."""
        return [self.rate ** (slot + 1) for slot in range(drafts)]

    def token_ms(self, cycle_ms: float, drafts: int) -> float:
        """Milliseconds a token, of a cycle with so many drafts."""
        return cycle_ms / (1 + sum(self.rates(drafts)))

    def cycles(self) -> Iterator[PlantedCycle]:
        """As many as a reply may need, drawn with these probabilities; no draft is surer than another."""
        draw, drafts = random.Random(1), max(self.drafts)
        for _ in range(self.tokens):
            yield [0.0] * drafts, next((slot for slot in range(drafts) if draw.random() >= self.rate), drafts)


class Files(NamedTuple):
    """One pair, written twice: folders of ours, and GGUF files."""

    target: Path
    drafter: Path
    gguf: Path
    gguf_drafter: Path


class Program(Protocol):
    """A program with its weights in place. ``about``: its version and how it was started; for each number of drafts
    that was ``tried`` how long a cycle takes and how many are accepted.
    """

    about: dict[str, Any]

    def figures(self) -> Figures:
        """Do the work once. DFlashError: it failed."""
        ...


def verify_figures(verify: Mapping[int, float]) -> Figures:
    """Name milliseconds by rows."""
    return {f"verify, {count} rows": ms for count, ms in verify.items()}


class Ours:
    """A session of the fused engine, whose drafts are planted."""

    def __init__(self, target: Path, drafter: Path, config: LoadConfig, work: Work, stack: ExitStack) -> None:
        self._work = work
        self._session = load(Pair("random", target, drafter, bundled=False), config)
        stack.callback(self._session.close)
        runner = self._session.runner
        assert isinstance(runner, FusedRunner)
        self._runner = runner
        planted = list(work.cycles())
        with torch.inference_mode():
            for drafts in Replies(runner, len(planted))._planted:
                drafts.plant(planted)
        self.about: dict[str, Any] = {
            "loaded_as": self._session.facts.loaded_as,
            "load": asdict(self._session.facts.load),
            "tried": {},
        }

    def figures(self) -> Figures:
        work, token_ms = self._work, dict[int, float]()
        plain, steps, _ = self._reply(work.prompt, work.tokens + 1)
        for drafts in work.drafts:
            drafted, cycles, _ = self._reply(work.prompt, work.tokens + 1, drafts)
            self.about["tried"][drafts] = {"cycle_ms": drafted / cycles, "accepted": work.tokens / cycles - 1}
            token_ms[drafts] = work.token_ms(drafted / cycles, drafts)
        self.about["drafts"] = min(work.drafts, key=token_ms.__getitem__)
        prompt, first = (self._reply(length, 1)[2] for length in (work.long, work.prompt))
        found = {"plain step": plain / steps, "drafted token": min(token_ms.values()), "prompt": prompt}
        return found | {"first token": first} | verify_figures(self._verify())

    def _reply(self, prompt: int, tokens: int, drafts: int = 0) -> tuple[float, int, float]:
        """Milliseconds behind the first token, cycles, milliseconds until the first token."""
        self._session.reset()
        drafting: Any = {"mode": "dflash", "block_size": drafts + 1} if drafts else {"mode": "ar"}
        ids = tuple(self._work.ids(prompt))
        began, told, cycles = time.perf_counter(), list[float](), 0
        for event in self._session.generate(Request(prompt_ids=ids, limits=Limits(tokens), **drafting)):
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


def answered(server: ServerProcess, path: str, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
    """A server's answer, and milliseconds until it was here. ServerError: the server ended, or refuses."""
    began = time.perf_counter()
    try:
        reply = server.endpoint.post(path, body, within(PATIENCE_S))
    except DFlashError as error:
        raise server.end_within(GONE_S) or error from error
    if reply is None:
        raise ServerError(f"the server does not know {path}", f"its log: {server.log}")
    return reply, 1e3 * (time.perf_counter() - began)


class LlamaServer:
    """Starts servers of llama.cpp for a file, and asks them."""

    def __init__(self, user: settings.Settings, flags: Sequence[str], files: Files, work: Work) -> None:
        self._user, self._work, self._files = user, work, files
        self._flags = ["--ctx-size", str(work.context), *SERVER, *flags]
        told = child_process.run([str(program_of("llama.cpp", user)), "--version"], capture_output=True, text=True)
        words = (told.stdout + told.stderr).splitlines()
        found = next((line for line in words if line.startswith("version: ")), "")
        self.about: dict[str, Any] = {"version": found.removeprefix("version: "), "flags": self._flags}

    def start(self, drafter: bool = False, words: Sequence[str] = ()) -> ServerProcess:
        choice = Choice("random", self._files.gguf, self._files.gguf_drafter)
        return launch("llama.cpp", choice, self._user, drafter, [*self._flags, *words])

    def reply(self, server: ServerProcess, prompt: int, tokens: int) -> tuple[Mapping[str, Any], float]:
        """The server's own figures, and milliseconds until its answer was here."""
        body = {"prompt": self._work.ids(prompt), "n_predict": tokens, "cache_prompt": False, "ignore_eos": True}
        body |= {"temperature": 0.0, "samplers": ["top_k"], "top_k": 1}  # the quickest way to the best token
        reply, ms = answered(server, "/completion", body)
        if reply["timings"]["predicted_n"] != tokens:
            raise ServerError(f"llama-server did not write {tokens} tokens", f"its log: {server.log}")
        return reply["timings"], ms


class LlamaCpp(LlamaServer):
    """A server that does not draft, and ``llama-bench`` after it: a large target has no room for both at once."""

    def __init__(
        self, user: settings.Settings, flags: Sequence[str], files: Files, work: Work, _stack: ExitStack
    ) -> None:
        super().__init__(user, flags, files, work)
        self._bench = program_of("llama.cpp", user).with_name("llama-bench")

    def figures(self) -> Figures:
        work = self._work
        with self.start() as server:
            self.reply(server, work.long, 2)  # makes its buffers
            plain, _ = self.reply(server, work.prompt, work.tokens + 1)
            prompt, first = (self.reply(server, length, 1)[1] for length in (work.long, work.prompt))
        found = {"plain step": plain["predicted_ms"] / work.tokens, "prompt": prompt, "first token": first}
        return found | verify_figures(self._verify())

    def _verify(self) -> dict[int, float]:
        work = self._work
        rows = ",".join(map(str, work.rows))
        words = ["-m", str(self._files.gguf), "-p", str(work.tokens), "-n", "0", "-d", str(work.prompt), "-b", rows]
        words += ["-ub", str(max(work.rows)), "-fa", "on", "-r", "1", "--no-warmup", "-o", "json"]
        told = child_process.run([str(self._bench), *words], capture_output=True, text=True)
        if told.returncode:
            raise ServerError(f"llama-bench ended with {told.returncode}: {told.stderr.strip()[-200:]}")
        spans = {each["n_batch"]: each["avg_ns"] / 1e6 for each in json.loads(told.stdout)}
        return {count: spans[count] / -(-work.tokens // count) for count in work.rows}


class LlamaCppDrafting(LlamaServer):
    """A server that drafts, with the best of some numbers of drafts, each tried once.

    Args:
        drafter: whether a drafter's file is opened; ``words``: what else makes it draft.
    """

    def __init__(
        self,
        user: settings.Settings,
        flags: Sequence[str],
        drafter: bool,
        words: Sequence[str],
        files: Files,
        work: Work,
        stack: ExitStack,
    ) -> None:
        super().__init__(user, flags, files, work)
        token_ms, self.about["tried"] = dict[int, float](), {}
        for drafts in work.drafts:
            with self.start(drafter, [*words, *self._drafting(drafts)]) as server:
                self._cycle_ms(server, drafts)
                token_ms[drafts] = work.token_ms(self._cycle_ms(server, drafts), drafts)
        best = self.about["drafts"] = min(work.drafts, key=token_ms.__getitem__)
        self.about["drafting"] = [*words, *self._drafting(best)]
        self._server = stack.enter_context(self.start(drafter, self.about["drafting"]))

    def figures(self) -> Figures:
        drafts = self.about["drafts"]
        return {"drafted token": self._work.token_ms(self._cycle_ms(self._server, drafts), drafts)}

    def _drafting(self, drafts: int) -> list[str]:
        rates = ",".join(f"{rate:.6f}" for rate in self._work.rates(drafts))
        return ["--spec-draft-ngl", "all", "--spec-draft-n-max", str(drafts), "--spec-synth-rates", rates]

    def _cycle_ms(self, server: ServerProcess, drafts: int) -> float:
        drafted, _ = self.reply(server, self._work.prompt, self._work.tokens + 1)
        cycles = self._work.tokens - drafted["draft_n_accepted"]
        found = drafted["predicted_ms"] / cycles
        self.about["tried"][drafts] = {"cycle_ms": found, "accepted": drafted["draft_n_accepted"] / cycles}
        return found


class VLLM:
    """Two servers, one of which drafts."""

    def __init__(
        self, user: settings.Settings, flags: Sequence[str], files: Files, work: Work, stack: ExitStack
    ) -> None:
        self._work = work
        drafts = max(work.drafts)
        drafting: dict[str, Any] = {"method": "dflash", "model": str(files.drafter)}
        drafting |= {"num_speculative_tokens": drafts, "rejection_sample_method": "synthetic"}
        words = ["--speculative-config", json.dumps(drafting | {"synthetic_acceptance_rates": work.rates(drafts)})]
        extra = ["--max-model-len", str(work.context), *VLLM_SERVER, *flags]
        choice = Choice("random", files.target, files.drafter)
        self._plain = stack.enter_context(launch("vllm", choice, user, False, extra))
        self._drafted = stack.enter_context(launch("vllm", choice, user, True, [*extra, *words]))
        told = child_process.run([str(program_of("vllm", user)), "--version"], capture_output=True, text=True)
        self.about: dict[str, Any] = {"version": told.stdout.strip(), "flags": extra}
        self.about |= {"drafts": drafts, "drafting": words}

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
        cycle_ms, drafts = drafted / found.cycles, self.about["drafts"]
        self.about["tried"] = {drafts: {"cycle_ms": cycle_ms, "accepted": found.accepted / found.cycles}}
        token = work.token_ms(cycle_ms, drafts)
        return {"plain step": plain / work.tokens, "drafted token": token, "prompt": prompt, "first token": first}

    def _reply_ms(self, server: Any, prompt: int, tokens: int) -> float:
        """Milliseconds until so many tokens were here."""
        body = {"model": "random", "prompt": self._work.ids(prompt), "max_tokens": tokens, "ignore_eos": True}
        reply, ms = answered(server, "/v1/completions", body | {"temperature": 0.0})
        if reply["usage"]["completion_tokens"] != tokens:
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
