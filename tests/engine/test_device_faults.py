"""Memory that runs out in a reply, and a device whose context is lost: planted into both engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, load, load_reference
from dflash_local.engine.device_faults import LEAST_CONTEXT, is_lost, is_out_of_memory, smaller_context
from dflash_local.engine.session import Session
from dflash_local.errors import ContextError, DeviceLostError, DFlashError, DoesNotFitError, DriverError
from dflash_local.events import Event, Notice
from dflash_local.models.fused.target import FusedTarget
from dflash_local.request import Limits, Request, SamplingParams
from tests.engine_sessions import ask, random_prompt, text_of
from tests.families import VOCAB
from tests.proposers import Oracle

Build = Callable[..., Session]
BOTH = pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
FULL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation"),
    MemoryError(),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
]
LOST = [
    torch.AcceleratorError("CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later"),
    RuntimeError("CUDA error: unknown error"),
    RuntimeError("the CUDA driver: context is destroyed"),
]


def plant(session: Session, fault: BaseException, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's part of that step raises the fault; undone by ``monkeypatch``."""

    def fail(*_: Any, **__: Any) -> Any:
        raise fault

    target = session.runner.target
    name = {"prefill": "prefill", "verify": "finish" if isinstance(target, FusedTarget) else "verify"}[step]
    monkeypatch.setattr(target, name, fail)


def events_until_the_end(session: Session, prompt: list[int], **fields: Any) -> tuple[list[Event], BaseException]:
    """What a reply gives before its error, and the error."""
    request = Request(prompt_ids=tuple(prompt), limits=Limits(24), sampling=SamplingParams(seed=1), **fields)
    seen: list[Event] = []
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the caller looks at it
        seen.extend(session.generate(request))
    return seen, caught.value


@BOTH
@pytest.mark.parametrize("step", ["prefill", "verify"])
@pytest.mark.parametrize("fault", FULL[:2], ids=lambda fault: type(fault).__name__)  # how others are told: below
def test_memory_that_runs_out_ends_the_reply_and_not_the_session(
    new_session: Build, family: str, step: str, fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(9)
    session = new_session(family, Oracle(VOCAB, text_of(family, tuple(prompt)), 3))
    with monkeypatch.context() as planted:
        plant(session, fault, step, planted)
        _, error = events_until_the_end(session, prompt)
    assert isinstance(error, DoesNotFitError) and error.exit_code == 5 and "\n" not in str(error)
    assert session.facts.context == 1000, "so few tokens did not fill it"
    assert ask(session, prompt).ids == list(text_of(family, tuple(prompt)))[9:33], "nothing half-written is left"


def test_a_long_chat_that_fills_the_memory_goes_on_with_a_smaller_context(
    new_session: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = new_session("qwen3", None)
    prompt = random_prompt(600)
    with monkeypatch.context() as planted:
        plant(session, FULL[0], "verify", planted)
        seen, error = events_until_the_end(session, prompt, mode="ar")
    assert isinstance(error, DoesNotFitError) and "ran out of memory with 600 tokens" in str(error)
    assert seen[-1] == Notice("the context is 450 tokens from now on, no longer 1,000", "warning")
    assert session.facts.context == session.facts.load.context == 450
    with pytest.raises(ContextError, match="the context holds 450"):
        ask(session, prompt, mode="ar")
    assert len(ask(session, random_prompt(440), 24, mode="ar").ids) == 10


def test_the_context_never_grows_and_keeps_a_reserve() -> None:
    assert smaller_context(4096, 4000) == 3000
    assert smaller_context(4096, LEAST_CONTEXT) == LEAST_CONTEXT
    assert smaller_context(4096, LEAST_CONTEXT - 1) == 4096
    assert smaller_context(100, 300) == 100


@pytest.mark.parametrize("step", ["prefill", "verify"])
def test_a_lost_context_is_told_in_a_line_and_never_used_again(
    new_session: Build, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, fault = random_prompt(9), LOST[0]
    session = new_session("qwen3", Oracle(VOCAB, text_of("qwen3", tuple(prompt)), 3))
    plant(session, fault, step, monkeypatch)
    touched: list[str] = []
    monkeypatch.setattr(session.runner, "restart", lambda *_: touched.append("restart"))
    _, error = events_until_the_end(session, prompt)
    assert isinstance(error, DeviceLostError) and error.exit_code == 7
    assert str(fault).splitlines()[0] in error.message and "\n" not in str(error)
    assert touched == ["restart"], "only where the request began, before the fault"
    touched.clear()

    def fail() -> None:
        touched.append("close")
        raise fault

    monkeypatch.setattr(session.runner, "close", fail)
    session.close()
    assert touched == ["close"], "a context that is lost cannot fail the close"


def test_other_faults_are_neither() -> None:
    others: tuple[Exception, ...] = (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("CUDA error"),
        KeyError("x"),
    )
    for error in others:
        assert not is_lost(error) and not is_out_of_memory(error)
    for error in FULL:
        assert is_out_of_memory(error) and not is_lost(error)
    for error in LOST:
        assert is_lost(error) and not is_out_of_memory(error)


NO_IMAGE = torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device\nSearch for")


@pytest.mark.parametrize(
    "fault, kind, line, hint",
    [
        (FULL[0], DoesNotFitError, "demo ran out of the device's memory", "dflash plan"),
        (LOST[0], DeviceLostError, "demo cannot be loaded, the device failed: ", "start the program"),
        (NO_IMAGE, DriverError, "the installed torch has no kernels for this card", "whl/cu126"),
    ],
)
def test_a_device_that_fails_while_loading_is_one_line(
    fault: BaseException, kind: type[DFlashError], line: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr(load_reference, "load_target", fail)
    with pytest.raises(kind) as caught:
        load(find("demo"), LoadConfig(device="cpu"))
    assert caught.value.message.startswith(line) and hint in caught.value.hint and "\n" not in str(caught.value)
