"""What others take for the same shapes: transformers and the reference engine, over random weights.

Each runs in a process of its own, whose failure is a line: this module, with a ``BaselineTask`` as JSON on stdin and
the answer as the last line of stdout.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local import child_process
from dflash_local.errors import DFlashError

if TYPE_CHECKING:
    from dflash_local.bench.random_pair import RandomPair
    from dflash_local.bench.random_run import Place

TOKENS = 32  # timed
WARM = 8  # before them
LIMIT_S = 240.0
PARENT_S = 0.5
ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Unsupported): ")
NAMES = {  # in this order: a mixture of experts may not be compiled within the limit
    "eager": "transformers, eager",
    "reference": "reference engine",
    "compiled": "transformers, compiled with a static cache",
}


@dataclass(frozen=True, slots=True)
class Baseline:
    """One of them. step_ms: of a plainly decoded token. cycle_ms: of a cycle of ``rows``. reason: why there is none."""

    name: str
    context: int
    step_ms: float | None = None
    cycle_ms: float | None = None
    rows: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BaselineTask:
    """What a process measures, behind ``context`` tokens; the configurations are as a checkpoint would hold them."""

    kind: str
    family: str
    text_config: dict[str, Any]
    drafter_config: dict[str, Any]
    context: int
    device: str
    dtype: str
    tokens: int = TOKENS


def tasks(pair: RandomPair, context: int, place: Place) -> list[BaselineTask]:
    """Every baseline of a pair."""
    family, text = pair.facts.model.family, pair.facts.text_config
    dtype = str(place.dtype).removeprefix("torch.")
    return [BaselineTask(kind, family, text, pair.drafter_config, context, str(place.device), dtype) for kind in NAMES]


def run_all(
    tasks: Sequence[BaselineTask],
    progress: Callable[[str, float], None] = lambda _text, _part: None,
    limit_s: float = LIMIT_S,
) -> Iterator[Baseline]:
    """One process after the other."""
    for index, task in enumerate(tasks):
        progress(NAMES[task.kind], index / len(tasks))
        yield run_one(task, limit_s)


def run_one(task: BaselineTask, limit_s: float = LIMIT_S, command: Sequence[str] = ()) -> Baseline:
    """The baseline, or why there is none: whatever breaks in its process stays there."""
    process = child_process.start(
        command or child_process.python_command("dflash_local.bench.baselines"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # compilers start processes of their own, which end with it
    )
    try:
        out, err = process.communicate(json.dumps(asdict(task)), timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Baseline(NAMES[task.kind], task.context, reason=f"it took more than {limit_s:g} s")
    finally:
        _end(process)
    return _read(task, process.returncode, out, err)


def _read(task: BaselineTask, code: int, out: str, err: str) -> Baseline:
    name = NAMES[task.kind]
    try:
        answer = json.loads((out.strip().splitlines() or [""])[-1])
        return Baseline(name, task.context, **answer)
    except (ValueError, TypeError):
        lines = [" ".join(line.split()) for line in err.splitlines() if line.strip()]
        errors = [line for line in lines if ERROR.match(line)]  # advice may follow the error itself
        last = (errors or lines or [f"its process ended with code {code}"])[-1]
        return Baseline(name, task.context, reason=last[:200])


def _end(process: subprocess.Popen[str]) -> None:
    """End it and what it started."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.communicate()


def main() -> None:
    """Measure one baseline in this process, which ends with the one that asked."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    task = BaselineTask(**json.loads(sys.stdin.read()))
    sys.stdout.write("\n" + json.dumps(measure(task)) + "\n")


def _end_with(parent: int) -> None:
    while os.getppid() == parent:  # Windows keeps the number of a parent that is gone
        time.sleep(PARENT_S)
    os._exit(1)


def measure(task: BaselineTask) -> dict[str, Any]:
    """The fields of a ``Baseline`` that were found out."""
    import torch

    model = random_model(task)
    ids = torch.randint(0, model.config.vocab_size, (task.context,), device=task.device)
    if task.kind != "reference":
        return _generate(model, ids, task)
    with torch.inference_mode():
        return _reference(model, ids, task)


def random_model(task: BaselineTask) -> Any:
    """transformers' own model of this shape; its initial values are random."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from dflash_local.models.transformers_config import text_model_config

    logging.set_verbosity_error()
    config = text_model_config(task.family, task.text_config)
    with torch.device(task.device):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=getattr(torch, task.dtype))
    return model.eval().requires_grad_(False)


def _generate(model: Any, ids: Any, task: BaselineTask) -> dict[str, Any]:
    """The median time of a token of ``generate``, after some to warm up; with a static cache it compiles."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    times: list[float] = []

    class Stamp(StoppingCriteria):  # type: ignore[misc]
        """Never stops; notes when each token was there."""

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            _wait(task.device)
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    compiled = task.kind == "compiled"
    options: dict[str, Any] = {"cache_implementation": "static"} if compiled else {}
    model.generation_config.eos_token_id = None  # random weights never mean to stop
    model.generation_config.pad_token_id = 0
    model.generate(
        ids.unsqueeze(0),
        attention_mask=torch.ones_like(ids).unsqueeze(0),
        do_sample=False,
        max_new_tokens=WARM + task.tokens + 1,
        stopping_criteria=StoppingCriteriaList([Stamp()]),
        **options,
    )
    if compiled and not hasattr(model, "_compiled_call"):
        return {"reason": "transformers does not compile this family with a static cache here"}
    spans = [after - before for before, after in zip(times, times[1:])][WARM:]
    return {"step_ms": 1e3 * statistics.median(spans)}


def _reference(model: Any, ids: Any, task: BaselineTask) -> dict[str, Any]:
    """Medians of plain steps and of cycles of the trained block; a random drafter is hardly ever right."""
    import torch

    from dflash_local.drafters.engines import proposer_of
    from dflash_local.drafters.kinds import read_drafter
    from dflash_local.engine.cpu_threads import settle_torch
    from dflash_local.engine.reference_runner import ReferenceRunner
    from dflash_local.engine.sampling import Sampler
    from dflash_local.models.transformers_target import TransformersTarget
    from dflash_local.request import SamplingParams

    config = read_drafter(task.drafter_config, Path("config.json"))
    settle_torch(sum(p.numel() for p in model.parameters()), torch.device(task.device))
    target = TransformersTarget(model, config.taps)
    room = task.context + config.block_size * (WARM + task.tokens + 2)
    runner = ReferenceRunner(target, proposer_of(config).random(config, target), room)
    found = {}
    for name, block in (("step_ms", 1), ("cycle_ms", config.block_size)):
        runner.restart(0, None)
        runner.begin(Sampler(SamplingParams(), 1, target.vocab_size, ids), frozenset(), block, block > 1)
        for _ in runner.prefill(ids.tolist(), 0):
            pass
        spans = []
        for _ in range(WARM + task.tokens):
            _wait(task.device)
            began = time.perf_counter()
            runner.launch()
            runner.collect()
            _wait(task.device)
            spans.append(time.perf_counter() - began)
        found[name] = 1e3 * statistics.median(spans[WARM:])
    return {**found, "rows": config.block_size}


def _wait(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    try:
        main()
    except DFlashError as error:
        sys.exit(str(error))
