"""Measures a pair over random weights: bandwidth, prefill, plain step, draft, verify, cycle, and the bytes they read.

Times are medians of recorded launches; what random weights accept says nothing, so nothing is accepted here.
"""

from __future__ import annotations

import gc
import time
import timeit
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import torch

from dflash_local.bench.random_pair import RandomPair, build
from dflash_local.engine.cycle_records import CycleKey
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.sampling import Sampler
from dflash_local.errors import DoesNotFitError, UsageError
from dflash_local.kernels.jit import why_no_kernels
from dflash_local.kernels.timing import replay_ms
from dflash_local.load_config import LoadConfig
from dflash_local.models.fused.kernel_choice import without_kernel
from dflash_local.models.fused.moe import fixed_routing
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.load_target import placement
from dflash_local.planner.machine import Machine, this_machine
from dflash_local.request import SamplingParams

REPLAYS = 31
ROWS = (1, 4, 8, 12)  # verified, where the trained block has as many
KEPT = 6  # rows that recurrent layers commit in each cycle, as if so many had been accepted
SLACK = 64  # tokens of room behind the longest context
PROBE_BYTES = 2**31  # read for the bandwidth; many times any cache
END_OF_NOTHING = 2**31 - 1

# Which experts a block's rows take while a mixture is measured. Random weights make the rows of a block alike, so that
# they choose more alike than rows of text do: the routing is set instead (``models.fused.moe``).
Routing = Literal["uniform", "correlated"]
Clock = Callable[[Callable[[], object], int], float]  # work and repeats to milliseconds


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how it is measured. clock: of one run of some work. probe: bytes read to find the bandwidth."""

    device: torch.device
    dtype: torch.dtype
    clock: Clock = replay_ms
    replays: int = REPLAYS
    probe: int = PROBE_BYTES


@dataclass(frozen=True, slots=True)
class Measures:
    """What to measure: committed tokens, verified rows, tokens of a prompt (0: none), routing; and how it is loaded:
    drafter precision, strict mode, the form of keys and values, the chunk of a prompt.
    """

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    prefill: int
    load: LoadConfig = LoadConfig()
    routing: Routing = "uniform"

    @property
    def room(self) -> int:
        """Tokens to make room for."""
        return max(*self.contexts, self.prefill) + SLACK


@dataclass(frozen=True, slots=True)
class MeasuredFigure:
    """One measured time and the bytes of weights, keys, values and states that were read in it."""

    ms: float
    bytes: int

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes / self.ms * 1e3


@dataclass(frozen=True, slots=True)
class AtContext:
    """Figures at so many committed tokens, by verified rows; ``experts``: different routed ones of a layer in each."""

    context: int
    step: MeasuredFigure
    draft: MeasuredFigure
    inject: MeasuredFigure
    verify: dict[int, MeasuredFigure]
    cycle: dict[int, MeasuredFigure]
    experts: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RandomFigures:
    """Everything measured.

    Attributes:
        copy, read: the device's bandwidth in bytes per second. peak: bytes allocated, None off a GPU.
        products: how each weight shape's product is cut. notices: what keeps the pair from its speed here.
    """

    copy: float
    read: float
    at: tuple[AtContext, ...]
    prefill_s: float | None
    peak: int | None
    products: dict[str, str]
    drafter_precision: str
    notices: tuple[str, ...]

    @property
    def bandwidth(self) -> float:
        """The better of the two."""
        return max(self.copy, self.read)


def rows_of(block: int, published: Sequence[int] = ()) -> tuple[int, ...]:
    """Numbers of verified rows to measure: usual ones, those that lengths are published for, the trained block."""
    return tuple(sorted({each for each in (*ROWS, *published) if each < block} | {block}))


def gpu(device: str, dtype: str) -> Place:
    """The requested GPU. UsageError: there is none, or the fused engine's kernels do not run on it."""
    where = placement(device, dtype)
    if where.gpus:
        raise UsageError(f"--weights random measures one GPU, not {device}", f"--device {where.home}")
    if why := why_no_kernels(where.device):
        raise UsageError(
            f"--weights random needs a CUDA GPU: it measures the fused engine's kernels, and {why}",
            "dflash plan MODEL --gpu NAME tells what would fit elsewhere",
        )
    if where.dtype == torch.float16:
        raise UsageError("the fused engine runs in bfloat16 or float32", "leave --dtype out")
    return Place(torch.device(where.device), where.dtype)


def machine(place: Place) -> Machine:
    """The device as the planner takes one, with what is free of its memory now."""
    if place.device.type != "cuda":
        return this_machine("cpu")
    free, total = torch.cuda.mem_get_info(place.device)
    return Machine(torch.cuda.get_device_name(place.device), "cuda", total, free, "", str(place.device))


def measure(
    pair: RandomPair, measures: Measures, place: Place, progress: Callable[[str, float], None]
) -> RandomFigures:
    """Build the pair and measure it; everything is freed at the end. DoesNotFitError: the device ran out of memory."""
    on_gpu = place.device.type == "cuda"
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if on_gpu:
                stack.enter_context(torch.cuda.device(place.device))
                torch.cuda.reset_peak_memory_stats()
            return _measure(pair, measures, place, progress)
    except torch.OutOfMemoryError as error:
        hint = "another program may have taken some: dflash plan MODEL tells what fits now"
        raise DoesNotFitError(f"{pair.target} with random weights ran out of the device's memory", hint) from error
    finally:
        if on_gpu:
            gc.collect()
            torch.cuda.empty_cache()


def _measure(
    pair: RandomPair, measures: Measures, place: Place, progress: Callable[[str, float], None]
) -> RandomFigures:
    progress("the card's bandwidth", 0.0)
    copy, read = bandwidth(place)
    if place.device.type == "cuda":
        torch.cuda.empty_cache()
    progress(f"random weights of {pair.target}", 0.05)

    def building(text: str, part: float) -> None:
        progress(text, 0.1 + 0.3 * part)

    runner, chosen = build(pair, measures.room, place.device, place.dtype, measures.load, building)
    prefill = None
    if measures.prefill:
        progress(f"a prompt of {measures.prefill:,} tokens", 0.4)
        prefill = prefill_s(runner, measures.prefill)
    at = []
    for index, context in enumerate(measures.contexts):
        progress(f"cycles at {context:,} tokens", 0.5 + 0.5 * index / len(measures.contexts))
        at.append(at_context(runner, context, measures.rows, place, measures.routing))
    peak = runner.peak_bytes if place.device.type == "cuda" else None
    products, notices = chosen_products(runner), without_kernel(runner.target.weights.measured)
    runner.close()
    return RandomFigures(copy, read, tuple(at), prefill, peak, products, chosen.name, notices)


def bandwidth(place: Place) -> tuple[float, float]:
    """Bytes per second of a copy (read and written) and of a sum (read alone) on the device."""
    source = torch.zeros(place.probe // 4, device=place.device)
    other = torch.empty_like(source)
    copied = place.clock(lambda: other.copy_(source), place.replays)
    read = place.clock(lambda: source.sum(), place.replays)
    return 2 * source.nbytes / copied * 1e3, source.nbytes / read * 1e3


def at_context(
    runner: FusedRunner, context: int, rows: Sequence[int], place: Place, routing: Routing = "uniform"
) -> AtContext:
    """All figures at ``context`` committed tokens. ``routing``: of a mixture's rows."""
    target, drafter = runner.target, runner.proposer
    if drafter is None:
        raise ValueError("a pair has a drafter")
    block, drafts = drafter.config.block_size, len(drafter.drafts)
    # The one place that looks behind the runner's public side: a cycle's launches by themselves.
    max_seq_len = runner.target.bucket(context + 2 * block)

    def timed(work: Callable[[], object], kept: int) -> float:
        def again() -> None:
            target.start.fill_(context)
            target.kept.fill_(kept)
            work()

        runner.progress.limit.fill_(END_OF_NOTHING)
        return place.clock(again, place.replays)

    experts: dict[int, float] = {}

    def block_figure(verified: int, work: Callable[[], object], beside: int = 0) -> MeasuredFigure:
        with fixed_routing(target.mixtures, verified, routing):
            ms = timed(work, min(KEPT, verified))
        distinct = runner.distinct_experts(verified)
        if distinct is not None:
            experts[verified] = distinct
        return MeasuredFigure(ms, beside + verify_bytes(target, context, verified) + expert_bytes(target, verified))

    def cycle_of(verified: int, made: int, beside: int = 0) -> MeasuredFigure:
        key = CycleKey(verified, made, made > 0, False, max_seq_len)

        def work() -> None:
            if made:
                runner.draft(key)
            runner._rest(key)

        return block_figure(verified, work, beside)

    def verify_of(verified: int) -> MeasuredFigure:
        return block_figure(verified, lambda: target.block(verified, max_seq_len, True))

    read, injected = drafter.block_bytes(context), drafter.inject_bytes()
    verify = {each: verify_of(each) for each in rows}
    made = {each: each - 1 if drafter.chained else drafts for each in rows if each > 1}
    cycle = {each: cycle_of(each, count, count * read // drafts + injected) for each, count in made.items()}
    return AtContext(
        context,
        step=cycle_of(1, 0),
        draft=MeasuredFigure(timed(lambda: runner.draft(CycleKey(block, drafts, True, False, max_seq_len)), 0), read),
        inject=MeasuredFigure(timed(lambda: drafter.inject(target.tapped[:block]), 0), injected),
        verify=verify,
        cycle=cycle,
        experts=experts,
    )


def verify_bytes(target: FusedTarget, context: int, rows: int) -> int:
    """Matrices for every row, keys and values of committed tokens and the block, recurrent states; no vectors."""
    weights = target.weights
    matrices = sum(product.weight.nbytes for product in (*weights.products, weights.head))
    return matrices + sum(layer.mixer.state_bytes(context + rows) for layer in target.layers)


def expert_bytes(target: FusedTarget, rows: int) -> int:
    """Of the experts that the last block's rows took, so many, a shared one among them included."""
    total = 0.0
    for part, distinct in zip(target.mixtures, target.distinct_of(rows), strict=True):
        experts = part.weights.experts
        of_one = (experts.gate_up.weight.nbytes + experts.down.weight.nbytes) / experts.gate_up.experts
        total += of_one * (distinct + experts.joined * part.launches(rows))
    return round(total)


def chosen_products(runner: FusedRunner) -> dict[str, str]:
    """How the product of each weight shape is cut."""
    own = runner.proposer.products if runner.proposer is not None else ()
    return {str(tuple(p.weight.shape)): str(p.config) for p in (*runner.target.weights.products, *own)}


def prefill_s(runner: FusedRunner, tokens: int) -> float:
    """Seconds to the first token of a prompt, the second of two runs."""
    device, vocabulary = runner.target.device, runner.target.vocab_size
    ids = torch.randint(0, vocabulary, (tokens,)).tolist()
    sampler = Sampler(SamplingParams(temperature=0.0), 1, vocabulary, torch.tensor(ids, device=device))
    span = 0.0
    for _ in range(2):
        runner.restart(0, None)
        runner.begin(sampler, frozenset(), runner.target.rows, True)
        _wait(device)
        began = time.perf_counter()
        for _ in runner.prefill(ids, 0):
            pass
        _wait(device)
        span = time.perf_counter() - began
    return span


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_ms(work: Callable[[], object], repeats: int) -> float:
    """Milliseconds of one run of the work by the host's clock, the median of so many: for tests without a GPU."""
    return 1e3 * sorted(timeit.repeat(work, number=1, repeat=repeats))[repeats // 2]
