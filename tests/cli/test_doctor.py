"""``dflash doctor``: each finding is judged, each problem has a fix, a missing GPU is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.cli import doctor_checks
from dflash_local.cli.main import main
from dflash_local.errors import MissingDependencyError, SettingsError
from dflash_local.planner import accelerators, machine
from dflash_local.planner.hardware import Driver, Folder, Gpu, Memory, TorchFacts
from dflash_local.planner.software import Compiler, VersionCommand

GIB = 2**30
DRIVER = Driver("470.10", ("NVIDIA T4",))
CPU_BUILD = TorchFacts("2.13.0+cpu")
CUDA_BUILD = TorchFacts("2.13.0", cuda="13.0")


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a GPU and without a problem, whatever this one is."""
    monkeypatch.setattr(doctor_checks.hardware, "probe_torch", lambda: CPU_BUILD)
    monkeypatch.setattr(doctor_checks.hardware, "nvidia_driver", lambda: None)
    monkeypatch.setattr(doctor_checks.hardware, "memory", lambda: Memory(16 * GIB, 12 * GIB, limited=False))
    monkeypatch.setattr(doctor_checks.hardware, "folder", lambda path: Folder(path, True, 50 * GIB))
    monkeypatch.setattr(doctor_checks.software, "missing_requirements", lambda: ())
    monkeypatch.setattr(doctor_checks.software, "version_of", {"transformers": "5.23.0"}.get)
    here = tmp_path / "dflash"
    here.write_text("from dflash_local.cli.main import main\n")
    monkeypatch.setattr(
        doctor_checks.software, "command", lambda name: VersionCommand(name, here, here, ("dflash-local",), True)
    )


@pytest.mark.usefixtures("healthy")
def test_a_machine_without_gpu_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {check["name"]: check for check in report["checks"]}
    assert report["problems"] == 0
    assert found["gpu"]["status"] == "info" and "CPU" in found["gpu"]["value"]
    for name in ("python", "torch", "triton", "c compiler", "bitsandbytes", "fla", "transformers"):
        assert found[name]["value"]
    for name in ("memory", "disk", "model cache", "data folder", "command dflash", "settings"):
        assert found[name]["status"] == "ok"


@pytest.mark.usefixtures("healthy")
def test_a_problem_exits_1_and_shows_its_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_checks.software, "version_of", {"transformers": "4.57.0"}.get)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr()
    assert "problem transformers" in shown.out and "-> pip install 'transformers>=5.17,<6'" in shown.out
    assert "1 problem." in shown.out and "\x1b" not in shown.out


@pytest.mark.usefixtures("healthy")
def test_bad_settings_are_a_finding_not_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_DTYPE", "float3")
    assert main(["doctor", "--json"]) == 1
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert "DFLASH_DTYPE" in found["settings"]["value"] and found["settings"]["fix"]


def test_the_real_machine_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (1 if report["problems"] else 0)
    assert all(check["fix"] for check in report["checks"] if check["status"] == "problem")
    assert report["checks"][0]["value"].startswith(".".join(map(str, sys.version_info[:3])))


@pytest.mark.parametrize(
    ("facts", "status", "word"),
    [
        (None, "problem", "not installed"),
        (TorchFacts("", error="libcudart.so.13 is missing"), "problem", "libcudart"),
        (TorchFacts("2.10.1+cpu"), "problem", "too old"),
        (CPU_BUILD, "ok", "CPU build"),
        (CUDA_BUILD, "ok", "CUDA 13.0"),
        (TorchFacts("2.13.0", hip="7.1"), "ok", "ROCm 7.1"),
        (TorchFacts("2.13.0+xpu", xpu="20250301"), "ok", "Intel GPUs"),
    ],
)
def test_torch_is_judged(facts: TorchFacts | None, status: str, word: str) -> None:
    check = doctor_checks.check_torch(facts)
    assert (check.status, word in check.value, bool(check.fix)) == (status, True, status == "problem")


@pytest.mark.parametrize(
    ("facts", "driver", "visible", "status", "word"),
    [
        (TorchFacts("2.13.0", cuda="13.0", gpus=(Gpu("H200", 140 * GIB, "9.0"),)), None, None, "ok", "140 GiB"),
        (TorchFacts("2.13.0", mps=True), None, None, "ok", "MPS"),
        (TorchFacts("2.13.0", hip="7.1", gpus=(Gpu("Radeon", 16 * GIB, "11.0"),)), None, None, "info", "of AMD"),
        (TorchFacts("2.13.0+xpu", xpu="20250301"), None, None, "info", "Intel"),
        (CPU_BUILD, None, None, "info", "none found"),
        (CPU_BUILD, DRIVER, None, "problem", "without CUDA"),
        (TorchFacts("2.13.0", hip="7.1"), DRIVER, None, "problem", "ROCm 7.1"),
        (CUDA_BUILD, DRIVER, None, "problem", "driver 470.10"),
        (CUDA_BUILD, DRIVER, "", "info", "hidden"),
    ],
)
def test_the_gpu_is_judged(
    facts: TorchFacts, driver: Driver | None, visible: str | None, status: str, word: str
) -> None:
    check = doctor_checks.check_gpu(facts, driver, visible)
    assert (check.status, word in check.value, bool(check.fix)) == (status, True, status == "problem")


@pytest.mark.parametrize(
    ("compiler", "gpu", "status"),
    [
        (Compiler("gcc", headers=True), True, "ok"),
        (Compiler(None, headers=True), True, "problem"),
        (Compiler("gcc", headers=False), True, "problem"),
        (Compiler(None, headers=False), False, "info"),
    ],
)
def test_a_missing_compiler_is_a_problem_only_with_a_gpu(compiler: Compiler, gpu: bool, status: str) -> None:
    check = doctor_checks.check_compiler(compiler, gpu)
    assert (check.status, bool(check.fix)) == (status, status == "problem")


@pytest.mark.parametrize("version", [None, "5.16.2", "6.0.0"])
def test_transformers_outside_its_range_is_a_problem(version: str | None) -> None:
    check = doctor_checks.check_transformers(version)
    assert check.status == "problem" and ">=5.17,<6" in check.fix


def test_python_too_old_is_a_problem() -> None:
    assert doctor_checks.check_python((3, 9)).status == "problem" and doctor_checks.check_python((3, 10)).status == "ok"


def test_little_memory_is_a_problem_and_a_limit_is_named() -> None:
    check = doctor_checks.check_memory(Memory(4 * GIB, GIB, limited=True))
    assert check.status == "problem" and "container" in check.value


def test_folders_that_cannot_be_written_are_problems(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    found = {
        check.name: check
        for check in doctor_checks.check_folders(tmp_path / "file" / "hub", tmp_path / "file" / "data")
    }
    assert found["model cache"].status == found["data folder"].status == "problem"
    assert "HF_HOME" in found["model cache"].fix and "DFLASH_HOME" in found["data folder"].fix


def test_no_home_folder_is_information() -> None:
    assert [check.status for check in doctor_checks.check_folders(None, None)] == ["info"]


def test_where_chats_are_kept_and_how_to_keep_none(tmp_path: Path) -> None:
    kept = doctor_checks.check_chats(settings.load({"HOME": str(tmp_path)})).value
    assert str(tmp_path) in kept and "--no-history" in kept
    for environ in ({}, {"HOME": str(tmp_path), "DFLASH_HISTORY": "off"}):
        assert doctor_checks.check_chats(settings.load(environ)).value == "not kept"


class TestCommandName:
    """Who answers to ``dflash``, when others use the name too."""

    @pytest.fixture
    def scripts(self, tmp_path: Path) -> tuple[Path, Path]:
        ours, other = tmp_path / "ours", tmp_path / "other"
        ours.write_text("from dflash_local.cli.main import main\n")
        other.write_text("from dflash.cli import main\n")
        return ours, other

    def test_ours_alone_and_none_are_no_problem(self, scripts: tuple[Path, Path], tmp_path: Path) -> None:
        ours, _ = scripts
        second, absent = tmp_path / "second", tmp_path / "absent"
        second.write_bytes(ours.read_bytes())
        for first, here, packages, status in (
            (ours, ours, ("dflash-local",), "ok"),
            (second, ours, ("dflash-local",), "info"),
            (None, ours, ("dflash-local",), "info"),
            (None, absent, (), "info"),
        ):
            command = VersionCommand("dflash", first, here, packages, here is ours)
            assert doctor_checks.check_command(command).status == status, command

    def test_another_package_in_this_environment_is_named(self, scripts: tuple[Path, Path]) -> None:
        ours, other = scripts
        both = ("dflash-local", "dflash-mlx")
        for here, is_ours in ((ours, True), (other, False)):
            check = doctor_checks.check_command(VersionCommand("dflash", here, here, both, is_ours))
            assert check.status == "problem" and "dflash-mlx" in check.value and "dflash-local" in check.fix

    def test_another_program_first_on_the_path(self, scripts: tuple[Path, Path]) -> None:
        ours, other = scripts
        check = doctor_checks.check_command(VersionCommand("dflash", other, ours, ("dflash-local",), True))
        assert check.status == "problem" and str(other) in check.value and str(ours) in check.value
        assert "another program, dflash;" in check.value and str(ours.with_name("dflash-local")) in check.fix
        absent = VersionCommand("dflash", other, ours.with_name("absent"), (), False)
        check = doctor_checks.check_command(absent)
        assert check.status == "problem" and str(other) in check.value and "python -m dflash_local" in check.fix


@pytest.mark.needs_torch
def test_the_compiler_of_kernels_is_named_with_what_is_known_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_local.kernels import kernel_record, nvrtc

    record = kernel_record.KernelRecord(None, {})
    record.verdicts = {"a": "right", "b": "hang"}
    compiler = type("Compiler", (), {"version": (13, 0)})
    monkeypatch.setattr(nvrtc, "nvrtc", compiler)
    monkeypatch.setattr(nvrtc, "why_not", lambda capability: None)
    monkeypatch.setattr(kernel_record, "record_of", lambda device: record)
    found = doctor_checks.check_nvrtc("9.0")
    assert found.status == "ok" and found.value == "13.0; 2 kernels tried on this card, 1 of no use"


@pytest.mark.needs_torch
def test_settings_that_are_not_read_do_not_end_the_look_at_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_local.kernels import kernel_record, nvrtc

    def unread(_device: str) -> None:
        raise SettingsError("settings.json is no JSON")

    monkeypatch.setattr(nvrtc, "nvrtc", type("Compiler", (), {"version": (13, 0)}))
    monkeypatch.setattr(nvrtc, "why_not", lambda capability: None)
    monkeypatch.setattr(kernel_record, "record_of", unread)
    assert doctor_checks.check_nvrtc("9.0") == doctor_checks.Check("nvrtc", "ok", "13.0")


@pytest.mark.needs_torch
def test_a_compiler_that_is_missing_is_told_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_local.kernels import nvrtc

    asked = []
    unmet = MissingDependencyError("the compiler NVRTC is not installed", "python -m pip install nvidia-cuda-nvrtc")
    monkeypatch.setattr(nvrtc, "why_not", lambda capability: asked.append(capability) or unmet)
    found = doctor_checks.check_nvrtc("12.0")
    assert found.status == "info" and found.fix == unmet.hint and "slow" in found.value and asked == [(12, 0)]


@pytest.mark.parametrize(
    ("versions", "status", "word"),
    [
        ({"torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.2"}, "ok", "come from these versions"),
        ({"torch": "2.13.0", "triton": None}, "info", "torch 2.13.0 is newer than what was measured (2.11)"),
        ({"torch": "2.11.1", "triton": "3.5.1"}, "info", "triton 3.5.1 is older than what was measured (3.6)"),
    ],
)
def test_versions_that_were_not_measured_are_a_note(versions: dict[str, str | None], status: str, word: str) -> None:
    found = doctor_checks.check_measured(versions)
    assert found.status == status and word in found.value and bool(found.fix) == (status == "info")


@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize(("torch", "told"), [(CPU_BUILD, False), (CUDA_BUILD, True)])
def test_measured_versions_are_told_of_a_torch_for_cuda_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, torch: TorchFacts, told: bool
) -> None:
    monkeypatch.setattr(doctor_checks.hardware, "probe_torch", lambda: torch)
    main(["doctor", "--json"])
    names = {check["name"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert ("measured with" in names) is told


TWO_CARDS = (
    "0, GPU-aaa, NVIDIA GeForce RTX 4090, 580.95.05, 24564, 23000, [N/A]\n"
    "1, GPU-bbb, NVIDIA RTX A6000, 580.95.05, 49140, 40000, [N/A]\n"
)


def test_of_two_cards_the_one_that_is_taken_and_what_others_use_of_it_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accelerators, "version_of", {"torch": "2.13.0+cu130"}.get)
    where = machine.this_machine("auto", {}, lambda command: TWO_CARDS)
    check = doctor_checks.check_device(where)
    assert check.status == "ok"
    assert check.value.startswith("cuda:1, NVIDIA RTX A6000: most free memory of 2 GPUs; 39.1 GiB free of 48.0 GiB")


def test_a_card_of_another_maker_is_named_where_the_cpu_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    card = '{"card0": {"VRAM Total Memory (B)": "1000", "VRAM Total Used Memory (B)": "400", "Card Series": "Radeon"}}'
    monkeypatch.setattr(accelerators, "version_of", {"torch": "2.13.0+cpu"}.get)
    where = machine.this_machine("auto", {}, lambda command: card if command[0] == "rocm-smi" else None)
    check = doctor_checks.check_device(where)
    assert check.status == "info" and check.value == "CPU: Radeon: the installed torch is built without ROCm"


@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize("wsl", [True, False])
def test_wsl2_has_a_line_that_names_its_page(
    wsl: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_checks.hardware, "is_wsl", lambda: wsl)
    assert main(["doctor", "--json"]) == 0
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert ("system" in found) == wsl
    if wsl:
        page = found["system"]["fix"].split()[0]
        text = (Path(__file__).resolve().parents[2] / page).read_text(encoding="utf-8")
        assert "Sysmem Fallback" in text and ".wslconfig" in text
