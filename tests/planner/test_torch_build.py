"""A card that the driver shows and torch cannot use is an error with the command that mends it, never a silent CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dflash_local.cli import doctor_checks
from dflash_local.errors import DriverError
from dflash_local.planner import hardware, torch_build
from dflash_local.planner.hardware import Driver, Gpu, TorchFacts

CU130 = TorchFacts("2.13.0", cuda="13.0", error="The NVIDIA driver on your system is too old\nsecond line")
CPU_BUILD = TorchFacts("2.13.0+cpu")
Plant = Callable[[TorchFacts | None, Driver | None], None]
H200 = Gpu("NVIDIA H200", 2**37, "9.0")


def card(version: str, *names: str) -> Driver:
    return Driver(version, names or ("NVIDIA T4",))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """``machine(torch, driver)`` plants what the probes find."""

    def plant(torch: TorchFacts | None, driver: Driver | None) -> None:
        monkeypatch.setattr(hardware, "probe_torch", lambda: torch)
        monkeypatch.setattr(hardware, "nvidia_driver", lambda: driver)

    return plant


@pytest.mark.parametrize(
    "torch, driver, line, mends",
    [
        (CU130, "550.54", "driver 550.54 is too old for CUDA 13, which needs 580 or newer", "whl/cu126"),
        (CU130, "570.86", "driver 570.86 is too old for CUDA 13", "whl/cu128"),
        (CU130, "470.10", "driver 470.10 is too old for CUDA 13", "update the NVIDIA driver to 580 or newer"),
        (CPU_BUILD, "580.95", "torch 2.13.0+cpu was built without CUDA", "whl/cu130"),
        (CPU_BUILD, "470.10", "torch 2.13.0+cpu was built without CUDA", "update the NVIDIA driver"),
        (CU130, "580.95", "cannot be used by torch for CUDA 13.0: The NVIDIA driver on your system", "--gpus all"),
    ],
)
def test_a_card_that_torch_cannot_use_is_one_line_with_its_fix(
    torch: TorchFacts, driver: str, line: str, mends: str, machine: Plant
) -> None:
    machine(torch, card(driver))
    for device in ("cuda", "cuda:1", "balanced", "auto"):
        with pytest.raises(DriverError) as caught:
            torch_build.require_usable(device, {})
    error = caught.value
    assert line in error.message and "NVIDIA T4" in error.message and "\n" not in str(error)
    assert mends in error.hint and "--device cpu" in error.hint and error.exit_code == 7
    check = doctor_checks.check_gpu(torch, card(driver), None)
    assert (check.status, check.value) == ("problem", error.message) and error.hint.startswith(check.fix)


@pytest.mark.parametrize(
    "device, torch, driver, visible",
    [
        ("cpu", CU130, card("470.10"), None),
        ("mps", CU130, card("470.10"), None),
        ("auto", CU130, None, None),
        ("auto", None, card("470.10"), None),
        ("auto", TorchFacts("", error="libcudart.so.13 is missing"), card("580.95"), None),
        ("auto", TorchFacts("2.13.0", cuda="13.0", gpus=(H200,)), card("580.95"), None),
        ("auto", CU130, card("470.10"), ""),
        ("auto", CU130, card("470.10"), "-1"),
        ("auto", CU130, card("470.10"), "NoDevFiles"),
        ("auto", CU130, card("470.10"), "1"),
    ],
)
def test_nothing_is_said_where_no_card_is_wanted_there_or_visible(
    device: str, torch: TorchFacts | None, driver: Driver | None, visible: str | None, machine: Plant
) -> None:
    machine(torch, driver)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    try:
        torch_build.require_usable(device, environ)
    except DriverError as error:
        pytest.fail(f"it ends the load: {error}")


def test_a_card_that_is_chosen_is_not_hidden(machine: Plant) -> None:
    machine(CU130, card("470.10"))
    for visible in ("0", "GPU-aaa", "0,7"):
        with pytest.raises(DriverError):
            torch_build.require_usable("auto", {"CUDA_VISIBLE_DEVICES": visible})
