"""The machine a plan is for: probes with every known oddity, choice of a device, cards by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_local.errors import UsageError
from dflash_local.planner import accelerators, cards, hardware, machine, nvrtc_files
from dflash_local.planner.accelerators import RunProbe
from dflash_local.planner.plan import plan
from tests.drafter_configs import published_target

MIB = 2**20
GIB = 2**30
MAIN = hardware.Memory(64 * GIB, 48 * GIB, limited=False)
ONE = "0, GPU-aaa, NVIDIA GeForce RTX 4090, 580.95.05, 24564, 23000, [N/A]\n"
TWO = ONE + "1, GPU-bbb, NVIDIA RTX A6000, 580.95.05, 49140, 40000, [N/A]\n"
SPARK = "0, GPU-ccc, NVIDIA GB10, 580.95.05, [N/A], [N/A], [N/A]\n"
MIG = "0, GPU-ddd, NVIDIA A100-SXM4-80GB, 580.95.05, 81920, [N/A], Enabled\n"
SLICES = """GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-ddd)
  MIG 3g.40gb     Device  0: (UUID: MIG-111)
  MIG 1g.10gb     Device  1: (UUID: MIG-222)
"""


@pytest.fixture(autouse=True)
def main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "memory", lambda: MAIN)
    monkeypatch.setattr(accelerators, "is_apple", lambda: False)
    monkeypatch.setattr(accelerators, "version_of", lambda package: "2.11.0+cu130" if package == "torch" else None)


def answers(query: str | None, listing: str | None = "", amd: str | None = None) -> RunProbe:
    """A runner of nvidia-smi and rocm-smi that answers as told."""

    def ask(command: Sequence[str]) -> str | None:
        if command[0] == "rocm-smi":
            return amd
        return listing if command[1] == "-L" else query

    return ask


def here(query: str | None, device: str = "auto", hidden: str | None = None, **more: str | None) -> machine.Machine:
    environ = {} if hidden is None else {"CUDA_VISIBLE_DEVICES": hidden}
    return machine.this_machine(device, environ, answers(query, **more))


def test_the_only_gpu_is_taken_with_what_it_has_free() -> None:
    found = here(ONE)
    assert (found.kind, found.name, found.device) == ("cuda", "NVIDIA GeForce RTX 4090", "cuda:0")
    assert (found.memory, found.free, found.why) == (24564 * MIB, 23000 * MIB, "the only GPU")


def test_of_two_gpus_the_one_with_more_free_memory_is_taken_and_why_is_told() -> None:
    found = here(TWO)
    assert (found.device, found.why) == ("cuda:1", "most free memory of 2 GPUs")
    assert here(TWO, "cuda").device == "cuda:0" and here(TWO, "cuda:0").name.endswith("4090")


@pytest.mark.parametrize(
    ("query", "back", "device", "free"),
    [
        (ONE, {"cuda:0": 1000 * MIB}, "cuda:0", 24000 * MIB),
        (ONE, {"cuda:0": 2**50}, "cuda:0", 24564 * MIB),
        (ONE, {"cuda:1": 1000 * MIB, "cpu": 2**30}, "cuda:0", 23000 * MIB),
        (TWO, {"cuda:0": 2**50}, "cuda:1", 40000 * MIB),
    ],
)
def test_what_a_loaded_pair_gives_back_counts_as_free(
    query: str | None, back: dict[str, int], device: str, free: int
) -> None:
    found = machine.this_machine("auto", {}, answers(query), back)
    assert (found.device, found.free) == (device, free)


def test_of_main_memory_what_is_given_back_is_free_at_the_moment() -> None:
    found = machine.this_machine("auto", {}, answers(None), {"cpu": 2**20})
    assert (found.free, found.free_now) == (56 * GIB, MAIN.available + 2**20)


@pytest.mark.parametrize("device", ["cuda:2", "cuda:2,0", "cuda:0,2"])
def test_a_gpu_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(UsageError, match="'cuda:2' is not there") as refused:
        here(TWO, device)
    assert refused.value.hint == "2 GPU visible, counted from cuda:0"
    with pytest.raises(UsageError, match="'cuda:1' is not there"):
        here(ONE, "cuda:0,1")
    with pytest.raises(UsageError, match="device 'cuda:0,1' is not there: no GPU was found"):
        here(None, "cuda:0,1")


@pytest.mark.parametrize("query", [None, "", "No devices were found\n", "Failed to initialize NVML: Driver/library\n"])
def test_no_gpu_means_a_cpu_plan(query: str | None) -> None:
    found = here(query)
    assert (found.kind, found.device, found.why) == ("cpu", "cpu", "no GPU was found")
    assert (found.memory, found.free, found.room) == (MAIN.total, 56 * GIB, "usable")


@pytest.mark.parametrize(
    ("total", "usable"), [(1.0, 0.5), (4.0, 2.0), (8.0, 6.0), (15.6, 13.5), (23.54, 20.5), (64.0, 56.0), (512.0, 448.0)]
)
def test_a_part_of_the_main_memory_is_for_no_plan(total: float, usable: float) -> None:
    """An eighth, at least 2 GiB; of a machine too small for that half."""
    assert machine.usable(round(total * GIB)) == usable * GIB


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_what_other_programs_take_at_the_moment_changes_no_plan(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    target = published_target("Qwen/Qwen3-4B")
    found = []
    for available in (60, 30, 6):
        monkeypatch.setattr(hardware, "memory", lambda a=available: hardware.Memory(64 * GIB, a * GIB, limited=False))
        found.append(plan(target, None, here(None, device)))
    assert len({each.context for each in found}) == 1 and all(each.fits for each in found)
    assert not found[0].crowded and "6.0 GiB of main memory is free right now" in found[2].crowded


@pytest.mark.parametrize(("driver", "fits"), [("570.86.10", False), ("580.95.05", True), ("unknown", True)])
def test_a_driver_too_old_for_the_installed_torch_is_told(driver: str, fits: bool) -> None:
    found = here(ONE.replace("580.95.05", driver))
    assert (found.kind == "cuda") == fits
    if not fits:
        assert found.why == "NVIDIA GeForce RTX 4090: driver 570.86.10 is too old for CUDA 13, which needs 580 or newer"


@pytest.mark.parametrize("hidden", ["", "-1", "7", "GPU-zzz", " "])
def test_visible_devices_that_hide_all_are_told(hidden: str) -> None:
    found = here(TWO, hidden=hidden)
    assert found.kind == "cpu" and found.why == f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU"


@pytest.mark.parametrize(
    ("hidden", "names"),
    [("0", ["aaa"]), ("1,0", ["bbb", "aaa"]), ("1,9,0", ["bbb"]), ("GPU-b", ["bbb"]), (None, ["aaa", "bbb"])],
)
def test_visible_devices_are_read_as_cuda_reads_them(hidden: str | None, names: list[str]) -> None:
    found = accelerators.visible(accelerators.nvidia(answers(TWO)), hidden)
    assert [device.uuid for device in found] == [f"GPU-{name}" for name in names]


def test_a_mig_slice_is_planned_with_its_own_memory() -> None:
    found = here(MIG, listing=SLICES)
    assert found.name == "NVIDIA A100-SXM4-80GB MIG 3g.40gb" and found.memory == 40 * GIB
    assert found.free < found.memory and "nominal" in found.why
    assert here(MIG, listing=SLICES, hidden="MIG-222").memory == 10 * GIB
    assert here(MIG, listing=SLICES, hidden="0").memory == 40 * GIB


@pytest.mark.parametrize("listing", [None, "", "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-ddd)\n"])
def test_a_divided_gpu_without_slices_cannot_be_used(listing: str | None) -> None:
    assert here(MIG, listing=listing).kind == "cpu"


def test_unified_memory_that_the_driver_does_not_tell_is_the_main_memory() -> None:
    found = here(SPARK)
    assert (found.kind, found.memory, found.free) == ("cuda", MAIN.total, MAIN.available)
    assert "main memory" in found.why


def test_a_known_card_whose_memory_is_not_told_has_its_nominal_one() -> None:
    found = here("0, GPU-e, NVIDIA H100 80GB HBM3, 580.95.05, [Insufficient Permissions], [N/A], [N/A]\n")
    assert found.memory == round(cards.CARDS["H100"] * GIB) and "nominal" in found.why


def test_a_driver_that_refuses_a_field_is_asked_without_it() -> None:
    def ask(command: Sequence[str]) -> str | None:
        return None if "mig.mode.current" in command[1] else ONE.rpartition(",")[0] + "\n"

    assert machine.this_machine("auto", {}, ask).free == 23000 * MIB


def torch_is(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "version_of", lambda package: version if package == "torch" else None)


def test_a_torch_without_cuda_means_a_cpu_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_is("2.13.0+cpu", monkeypatch)
    found = here(ONE)
    assert found.kind == "cpu" and "2.13.0+cpu is built without CUDA" in found.why


def test_amd_devices_are_read_as_far_as_rocm_smi_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    card = '"VRAM Total Memory (B)": "25753026560", "VRAM Total Used Memory (B)": "753026560", "Card Series": "RX 7900"'
    answer = f'{{"card0": {{{card}}}, "system": {{}}}}'
    assert here(None, amd=answer).why == "RX 7900: the installed torch is built without ROCm"
    torch_is("2.11.0+rocm7.1", monkeypatch)
    found = here(None, amd=answer)
    assert (found.kind, found.name, found.free) == ("cuda", "RX 7900", 25000000000)
    monkeypatch.setattr(machine, "find_spec", lambda _: object())  # triton is there, as ROCm's builds have it
    assert not here(None, amd=answer).kernels
    assert here(None, amd="not json").kind == "cpu"


def test_apple_takes_three_quarters_of_the_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "is_apple", lambda: True)
    found = here(None)
    assert (found.kind, found.free, found.device) == ("mps", 48 * GIB, "mps") and "75 %" in found.why


def fake_smi(folder: Path, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(
    "script",
    [
        "exit 9",
        "echo 'NVIDIA-SMI has failed'; exit 6",
        "printf '\\377\\376, x\\n'",
        "exec sleep 60",
        "echo 0,1,2",
        "kill -9 $$",
    ],
)
def test_a_broken_nvidia_smi_on_the_path_never_breaks_a_plan(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_smi(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(hardware, "SMI_TIMEOUT_S", 0.3)
    assert machine.this_machine("auto", {}).kind == "cpu"


# --- machines by name --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "card", "gib"),
    [
        ("RTX 4090", "RTX 4090", 24),
        ("rtx4090", "RTX 4090", 24),
        ("NVIDIA GeForce RTX 3060", "RTX 3060", 12),
        ("4060ti", None, 0),
        ("rtx-4060-ti", "RTX 4060 Ti", 16),
        ("a100 80gb", "A100-SXM4-80GB", 80),
        ("A100-40", "A100-SXM4-40GB", 40),
        ("h100", "H100 80GB HBM3", 79.6),
        ("h200", "H200", 140.4),
    ],
)
def test_a_card_is_found_by_its_usual_spellings(name: str, card: str | None, gib: float) -> None:
    if card is None:
        with pytest.raises(UsageError, match="RTX 4060 Ti"):
            machine.named(name, None)
    else:
        found = machine.named(name, None)
        assert (found.name, found.kind, found.memory) == (card, "named", round(gib * GIB))


@pytest.mark.parametrize(("typo", "meant"), [("RTX 4900", "RTX 4090"), ("A100", "A100 80GB"), ("H20", "H200")])
def test_a_typo_suggests(typo: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        machine.named(typo, None)
    assert meant in caught.value.hint and "--gpu-memory" in caught.value.hint


def test_a_memory_is_a_machine_and_wins_over_the_table() -> None:
    found = machine.named(None, 24)
    assert found.memory == 24 * GIB and 23 * GIB < found.free < 24 * GIB and "nominal" in found.why
    other = machine.named("Brand New", 48)
    assert (other.name, other.memory) == ("Brand New", 48 * GIB)


@pytest.mark.parametrize(
    ("given", "card", "gib"),
    [(24, "RTX 4090", 24.0), (80, "H100 80GB HBM3", 79.6), (79.5, "H100 80GB HBM3", 79.5), (20, "RTX 4080", 20.0)]
    + [(6, "RTX 4060", 6.0), (192, "H100 80GB HBM3", 192.0)],
)
def test_a_memory_alone_is_the_typical_card_of_that_size_or_below(given: float, card: str, gib: float) -> None:
    found = machine.named(None, given)
    assert (found.name, found.memory) == (card, round(gib * GIB)) and f"cards of {given:g} GiB" in found.why


@pytest.mark.parametrize("memory", [0, -1, float("nan"), float("inf"), 1e9])
def test_a_senseless_memory_is_refused(memory: float) -> None:
    with pytest.raises(UsageError, match="not a size"):
        machine.named(None, memory)


@pytest.mark.parametrize(
    ("told", "kernels"), [("8.9", True), ("8.0", True), ("7.5", False), ("12.0", True), ("[N/A]", True)]
)
def test_the_fused_engines_kernels_need_a_new_card(monkeypatch: pytest.MonkeyPatch, told: str, kernels: bool) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda _: object())
    assert here(ONE.rstrip() + f", {told}").kernels == kernels
    monkeypatch.setattr(machine, "find_spec", lambda _: None)
    assert not here(ONE.rstrip() + f", {told}").kernels, "and Triton"


def test_a_card_without_the_compiler_of_its_cuda_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    places = {"nvidia": SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])}
    monkeypatch.setattr(nvrtc_files, "find_spec", places.get)
    monkeypatch.setattr(nvrtc_files, "toolkit_library", lambda cuda: f"libnowhere.so.{cuda}")
    for cuda, there in ((13, False), (12, False), (None, False)):
        monkeypatch.setattr(accelerators, "cuda_major", lambda cuda=cuda: cuda)
        assert here(ONE).compiler == there
    library.touch()
    for cuda, there in ((13, True), (12, False), (None, True)):
        monkeypatch.setattr(accelerators, "cuda_major", lambda cuda=cuda: cuda)
        assert here(ONE).compiler == there


def test_a_driver_that_tells_no_architecture_leaves_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda _: object())
    asked: list[str] = []

    def ask(command: Sequence[str]) -> str | None:
        asked.append(command[1])
        return None if "compute_cap" in command[1] else ONE.replace("NVIDIA GeForce RTX 4090", "Tesla T4")

    assert not machine.this_machine("auto", {}, ask).kernels
    assert len([query for query in asked if query.startswith("--query")]) == 2


def test_named_gpus_are_taken_together_in_their_order() -> None:
    found = here(TWO + "2, GPU-eee, NVIDIA L4, 580.95.05, 23034, 22000, [N/A]\n", "cuda:1,0")
    assert found.name == "NVIDIA RTX A6000 and NVIDIA GeForce RTX 4090" and found.device == "cuda:1,0"
    assert [each.device for each in found.cards] == ["cuda:1", "cuda:0"] and found.count == 1
    assert found.free_of_cards == (40000 * MIB, 23000 * MIB) and found.free == 63000 * MIB
    assert here(TWO, "cuda:1,0", hidden="1,0").free_of_cards == (23000 * MIB, 40000 * MIB)


def test_several_gpus_are_counted_and_taken_together() -> None:
    one = machine.this_machine("auto", {}, answers(TWO))
    assert one.count == 2 and one.device == "cuda:1"
    assert machine.this_machine("auto", {}, answers(ONE)).count == 1
    all_of_it = machine.named("RTX 4090", 24, 3).together()
    assert all_of_it.name == "3 x RTX 4090" and all_of_it.memory == 72 * GIB
    assert all_of_it.device == "balanced" and all_of_it.runs_kernels(dense=True)
    assert all_of_it.free_of_cards == 3 * (machine.named("RTX 4090", 24).free,)
