"""``dflash models``: every pair in a line, at any width; what is here, with sizes; nothing heavy loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_local.cli.options import complete_model
from tests.cli.conftest import DRAFTER, OVERLAY, TARGET, Cli, contents, write_overlay
from tests.fake_hub import FakeHub

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "numpy", "tokenizers", "textual", "gradio", "jinja2"}


def row_of(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_is_aligned_and_as_wide_as_the_terminal(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    result = cli("models", "--gpu-memory", "24")
    lines = result.out.splitlines()
    table = lines[: lines.index("")]
    assert result.code == 0 and len(table) >= 20 and max(map(len, lines)) <= width and "\x1b" not in result.out
    at = table[0].index("STATE")
    assert all(line[at - 2 : at] == "  " for line in table)
    assert ("RUNS ON" in table[0]) is (width == 120)
    assert "Qwen/Qwen3-Coder-30B-A3B-Instruct" in result.out
    if width == 120:
        says_what_fits_and_what_does_not(result.out)


def says_what_fits_and_what_does_not(text: str) -> None:
    assert row_of(text, "Qwen/Qwen3.5-9B")[1:5] == ["released", "local", "20.39", "GiB"]
    assert row_of(text, "Qwen/Qwen3.5-9B")[-4] == "fits" and row_of(text, "demo")[-2:] == ["bundled", "fits"]
    assert row_of(text, "Qwen/Qwen3.5-27B")[-4] == "int4" and row_of(text, "Qwen/Qwen3.6-27B")[1] == "preview"
    assert row_of(text, "moonshotai/Kimi-K2.5")[-1] == "server"
    assert row_of(text, "meta-llama/Llama-3.1-8B-Instruct")[-1] == "gated"
    assert "announced" in row_of(text, "zai-org/GLM-5.1")
    second = row_of(text, "Qwen/Qwen3.8-27B")
    assert second[1:4] == ["released", "dflash2", "local"] and second[-6:-3] == ["fits", "in", "int4"]
    assert row_of(text, "openai/gpt-oss-120b")[-3] == "needs"


def test_json_has_everything(cli: Cli) -> None:
    found = cli("models", "--json", "--gpu", "RTX 4090").json
    assert found["machine"]["name"] == "RTX 4090"
    pairs = {pair["name"]: pair for pair in found["pairs"]}
    nine = pairs["Qwen/Qwen3.5-9B"]
    assert (nine["target_gib"], nine["drafter_gib"], nine["context"]) == (17.98, 2.41, 262144)
    assert nine["drafter"]["id"] == "z-lab/Qwen3.5-9B-DFlash" and len(nine["fingerprints"]) == 2
    assert nine["state"] == "absent" and nine["plan"]["format"] == "bfloat16" and nine["plan"]["context"] >= 2048
    assert pairs["zai-org/GLM-5.1"]["drafter"] is None and pairs["zai-org/GLM-5.1"]["target_gib"] is None
    assert pairs["demo"]["bundled"] == "demo" and pairs["moonshotai/Kimi-K2.5"]["runs_on"] == "server"


def test_here_shows_what_is_here_and_what_it_takes(cli: Cli, toy_hub: FakeHub) -> None:
    assert "No pair is in" in cli("models", "--here").out
    assert cli("pull", TARGET).code == 0
    toy_hub.add_repo("else/where", {"config.json": b"{}", "model.safetensors": b"\0" * 8})
    shown = cli("models", "--here").out
    target, drafter = row_of(shown, TARGET), row_of(shown, DRAFTER)
    assert target[1:4] == ["target", "5.8", "MiB"] and target[-2:] == ["yes", "complete"]
    assert drafter[1:4] == ["drafter", "1.6", "MiB"] and len(drafter[4]) == 12
    assert "7.4 MiB in " in shown and "with the package: demo, demo-hybrid" in shown
    found = cli("models", "--here", "--json").json
    assert found["bundled"] == ["demo", "demo-hybrid"]
    pair = found["pairs"][0]
    assert pair["state"] == "local" and pair["verified"] and pair["bytes"] == found["total_bytes"]
    assert pair["target"]["commit"][:12] == target[4] and pair["target"]["missing"] == []
    row = row_of(cli("models").out, TARGET)
    assert "local" in row and row[-1] == "overridden"


def test_a_variant_that_is_here_stands_with_its_pair(cli: Cli, toy_hub: FakeHub, own_home: Path) -> None:
    write_overlay(own_home, f"{OVERLAY}    variants:\n      - {{repo: toys/Toy-9B-int8, format: int8}}\n")
    toy_hub.add_repo("toys/Toy-9B-int8", contents(toy_hub, TARGET))
    assert cli("pull", TARGET, "--variant", "int8", "--force").code == 0
    shown, found = cli("models", "--here").out, cli("models", "--here", "--json").json
    assert row_of(shown, TARGET)[-2:] == ["not", "here"] and "no pair of the registry" not in shown
    assert row_of(shown, "toys/Toy-9B-int8")[1:4] == ["variant", "5.8", "MiB"]
    (pair,) = found["pairs"]
    assert pair["state"] == "variant" and pair["verified"] and pair["bytes"] == found["total_bytes"] > 7e6
    assert pair["variants"]["toys/Toy-9B-int8"]["missing"] == [] and found["other"]["repos"] == 0
    assert "variant" in row_of(cli("models").out, TARGET) and "verified, 7.4 MiB" in cli("show", TARGET).out


def test_files_of_another_program_are_counted_and_not_listed(cli: Cli, own_home: Path) -> None:
    hub = own_home / ".cache" / "huggingface" / "hub"
    for repo in ("models--some--thing", "models--Qwen--Qwen3-4B"):
        snapshot = hub / repo / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_bytes(b"{}")
    shown = cli("models", "--here").out
    assert "some/thing" not in shown and "1 repositories that belong to no pair" in shown.replace("repository", "1")
    assert row_of(shown, "Qwen/Qwen3-4B")[-3:] == ["1", "file", "missing"]
    assert row_of(cli("models").out, "Qwen/Qwen3-4B").count("partial") == 1


def test_a_tampered_repository_is_a_remark_and_no_failure(cli: Cli, own_home: Path) -> None:
    for name in ("Qwen3-4B", "Qwen3-Coder-Next"):  # of which the second does not fit 8 GiB
        snapshot = own_home / ".cache" / "huggingface" / "hub" / f"models--Qwen--{name}" / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").symlink_to("/etc/passwd")
    assert cli("models").code == 0 and cli("models", "--cards", "--gpu-memory", "8").code == 0
    assert "not opened" in cli("models", "--here", "--json").json["pairs"][0]["target"]["notice"]
    run = cli("run", "Qwen/Qwen3-4B", "hi")
    assert run.code == 4 and "not opened" in run.err


def test_escape_sequences_of_a_registry_are_shown_and_not_sent(cli: Cli, own_home: Path) -> None:
    write_overlay(own_home, OVERLAY + '    notes: "a\\e]0;x\\a\\nb"\n    licence: "\\e[2Jfree"\n')
    shown = cli("show", TARGET)
    assert shown.code == 0 and "\x1b" not in shown.out and "\x07" not in shown.out
    assert "a␛]0;x␇␊b" in shown.out and "␛[2Jfree" in shown.out
    assert "\x1b" not in cli("models").out + cli("models", "--json").out


def test_a_bad_overlay_exits_3_for_every_command_that_reads_it(cli: Cli, own_home: Path) -> None:
    write_overlay(own_home, OVERLAY.replace("family:", "famly:"))
    for argv in (("models",), ("show", TARGET), ("plan", TARGET), ("pull", TARGET), ("run", TARGET, "hi")):
        result = cli(*argv)
        assert result.code == 3 and "registry.yaml" in result.err and "family" in result.err
    assert cli("rm", TARGET, "--yes").code == 3


def test_nothing_heavy_is_imported() -> None:
    """By one command after the other, in one process; the last alone asks a hub."""
    commands = [
        ["models"],
        ["models", "--here", "--json"],
        ["show", "Qwen/Qwen3.5-9B"],
        ["plan", "Qwen/Qwen3-4B", "--gpu-memory", "24"],
        ["rm", "Qwen/Qwen3-4B", "--dry-run"],
        ["pull", "Qwen/Qwen3-4B", "--dry-run"],
    ]
    program = (
        "import sys\n"
        "from dflash_local.cli.main import main\n"
        f"for argv in {commands!r}:\n"
        "    main(argv)\n"
        "    print('loaded', *sys.modules, file=sys.stderr, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    lines = [line.split() for line in done.stderr.splitlines() if line.startswith("loaded ")]
    assert done.returncode == 0 and len(lines) == len(commands), done.stderr
    for argv, (_, *names) in zip(commands, lines, strict=True):
        loaded = {name.split(".")[0] for name in names}
        assert "dflash_local" in loaded and not loaded & HEAVY, argv
        assert "huggingface_hub" not in loaded or argv[0] == "pull", argv


def test_the_shell_completes_names(cli: Cli, own_home: Path) -> None:
    assert complete_model("dem") == ["demo", "demo-hybrid"]
    assert "Qwen/Qwen3.5-9B" in complete_model("Qwen/Qwen3.5") and complete_model("qwen3-4") == ["qwen3-4B"]
    environ = {
        **os.environ,
        "_DFLASH_COMPLETE": "complete_bash",
        "COMP_WORDS": "dflash show qwen/qwen3.5-9",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-m", "dflash_local"], cwd=ROOT, capture_output=True, env=environ, timeout=60
    )
    assert done.stdout.split() == [b"qwen/qwen3.5-9B"]
    write_overlay(own_home, "schema: 9\n")
    assert complete_model("dem") == ["demo", "demo-hybrid"]


def test_gguf_files_of_other_programs_are_listed_with_what_is_here(cli: Cli, own_home: Path) -> None:
    file = own_home / ".cache" / "llama.cpp" / "a-model.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x" * 2**20)
    listed = cli("models", "--here").out
    assert f"1.0 MiB  llama.cpp  {file}\n" in listed and "dflash plan PATH" in listed
    (known,) = cli("models", "--here", "--json").json["gguf"]
    assert known == {"name": "a-model", "size": 2**20, "path": str(file), "program": "llama.cpp"}


def test_the_table_of_the_readme_is_what_models_prints(cli: Cli) -> None:
    """A line for each memory, with the pairs that fit it and no smaller one, by the word under FITS."""
    shown = re.findall(r"^\| ([0-9]+) \| (.+) \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    seen: set[str] = set()
    lines = []
    for gib, _ in shown:
        pairs = cli("models", "--gpu-memory", gib, "--json").json["pairs"]
        words: dict[str, list[str]] = {}
        for each in pairs:
            if each["fits"].startswith("fits") and "/" in each["name"] and each["name"] not in seen:
                seen.add(each["name"])
                words.setdefault(each["fits"].removeprefix("fits "), []).append(each["name"].partition("/")[2])
        lines.append((gib, "; ".join(f"{word}: {', '.join(names)}" for word, names in words.items())))
    assert [gib for gib, _ in shown] == ["12", "16", "24", "80"]
    assert shown == lines, "\n".join(f"| {gib} | {names} |" for gib, names in lines)
