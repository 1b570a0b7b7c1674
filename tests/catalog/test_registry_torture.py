"""Whatever a registry file holds, the answer is rows or one line with file and line."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dflash_local.catalog import registry
from dflash_local.catalog.registry import Registry
from dflash_local.errors import SettingsError

Load = Callable[["str | bytes"], Registry]
PAIR = "  - target: a/b\n    drafter: c/d\n"
PACKAGE = f"name: x, version: '1', sha256: {'a' * 64}, wheel_bytes: 10, member_bytes: 20"


@pytest.fixture(params=["C", "Python"])
def load(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads the content as the one packaged registry, with PyYAML's C parser and with its Python one."""
    if request.param == "Python":
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    elif not hasattr(yaml, "CSafeLoader"):
        pytest.skip("this PyYAML has no C parser")

    def load(content: str | bytes) -> Registry:
        path = tmp_path / "registry.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        monkeypatch.setattr(registry, "PACKAGED", (path,))
        return registry.load()

    return load


def fault(load: Load, content: str | bytes) -> str:
    """Message and hint of the one error that the content must cause."""
    with pytest.raises(SettingsError) as found:
        load(content)
    assert found.value.exit_code == 3
    assert "registry.yaml" in found.value.message and "\n" not in str(found.value)
    assert str(found.value).isprintable()
    return str(found.value)


def of_pair(fields: str) -> str:
    """A registry of one pair with these fields, the first of which is in line 5."""
    return f"schema: 1\npairs:\n{PAIR}" + "".join(f"    {line}\n" for line in fields.splitlines())


def test_a_missing_file_names_every_path_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = registry.PACKAGED
    monkeypatch.setattr(registry, "PACKAGED", (tmp_path / "one.yaml", tmp_path / "file" / "two.yaml"))
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError) as found:
        registry.load()
    assert "one.yaml" in found.value.message and "two.yaml" in found.value.message and found.value.exit_code == 3
    monkeypatch.setattr(registry, "PACKAGED", (tmp_path / "one.yaml", packaged[1]))
    assert registry.load().find("demo")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "yaml: expected a mapping, got nothing"),
        ("# only a comment\n", "yaml: expected a mapping, got nothing"),
        ("null\n", "yaml: expected a mapping, got nothing"),
        ("\n- a\n- b\n", "yaml: expected a mapping, got a list"),
        ("just text\n", "yaml: expected a mapping, got a single value"),
        (f"schema: 1\npairs:\n{PAIR}---\nschema: 1\n", "line 6: expected one mapping, got a second document"),
        ("schema: 1\npairs: {a: b}\n", "line 2: the registry: pairs must be a list"),
        ("schema: 1\npairs: [text]\n", "line 2: the registry: pairs[0] must be an object"),
    ],
)
def test_anything_but_one_mapping_is_refused(load: Load, content: str, found: str) -> None:
    assert found in fault(load, content)


def test_a_key_or_pair_that_stands_twice_names_both_lines(load: Load) -> None:
    said = fault(load, of_pair("family: x\nfamily: y"))
    assert "line 6:" in said and "line 5" in said and "'family'" in said
    said = fault(load, f"schema: 1\npairs:\n{PAIR}  - target: A/B\n    drafter: e/f\n")
    assert "line 5:" in said and "line 3" in said and "a/b" in said
    said = fault(load, f"schema: 1\npairs:\n{PAIR}    aliases: [x]\n  - {{target: e/f, drafter: g/h, aliases: [X]}}\n")
    assert "line 6:" in said and "line 3" in said and "'X'" in said


FAULTS = [
    ("fingerprints:\n  - {blocksize: 16}", "line 6: a/b: fingerprints[0].blocksize is unknown", "'block_size'"),
    ("blocksize: 16", "line 5: a/b: blocksize is unknown", "'block_size' of fingerprints"),
    ("server: {vlm: x}", "line 5: a/b: server.vlm is unknown", "'vllm'"),
    ("<<: {family: x}", "a/b: '<<' is unknown", "allowed: bundled"),
    ("revisions: {target: 3.10}", "line 5: a/b: revisions.target must be a revision", "put it in quotes"),
    ("family: no", "line 5: a/b: family must be text, got False", "put it in quotes"),
    ("aliases: [007]", "line 5: a/b: aliases[0] must be a name", "put it in quotes"),
    ("notes: 2026-11-20", "line 5: a/b: notes must be text, got datetime.date", "put it in quotes"),
    ("thinking: requird", "line 5: a/b: thinking must be one of", "'required'"),
    ("good_at: [code]", "line 5: a/b: good_at must be a sentence", ""),
    ("good_at: code", "line 5: a/b: good_at must be a sentence of up to 80 characters", ""),
    ("gated: 3", "line 5: a/b: gated must be true or false", ""),
    ("acceptance_band: 100", "acceptance_band must be a number from 1 to 64", ""),
    ("sizes_gib: {target: .nan}", "sizes_gib.target must be a number from 0 to 1,000,000", ""),
    (
        "published: [{source: x, generation: y, tasks: {z: {1: {}}}}]",
        "published[0].tasks[...] has a key that is not",
        "",
    ),
    ("published: [{source: x, tasks: {}}]", "line 5: a/b: published[0].generation is missing", ""),
    (
        "bundled_drafter: x",
        "line 3: a/b: has 'bundled_drafter' as the drafter of a 'target', in place of 'drafter'",
        "",
    ),
    ("bundled: x", "line 3: a/b: has either a target or the name", ""),
    ("variants: [{repo: a/c, format: fp8}, {repo: a/d, format: FP8}]", "two variants that are called 'fp8'", ""),
    ("server: {vllm: {command: vllm serve TARGET}}", "server.vllm names no TARGET or no DRAFTER", ""),
    ("server: {vllm: {command: 'TARGET DRAFTER \"'}}", "server.vllm No closing quotation", ""),
    (f"package: {{{PACKAGE}, member: ../b.gguf}}", "package.member must be a GGUF file of a wheel", ""),
    (f"package: {{{PACKAGE}, member: a/b.gguf, size: 1}}", "package.size is unknown", "wheel_bytes"),
    *((f'revisions: {{target: "{word}"}}', "must be a revision", "") for word in ("../main", "a b", "-x", "a..b", "…")),
    *((f'mirrors: ["{word}"]', "line 5: a/b: mirrors[0] must be a repository", "") for word in ("a/b/c", "-rf/x", "")),
    *((f"context: {number}", "from 1 to 1,073,741,824", "") for number in (-1, 0, 1e12, 16.5, '"16"', [16], True, "a")),
    *((rf'{name}: "\e[2J"', "a/b: ", "") for name in ("kind", r'"\e[2J"', "context")),
]


@pytest.mark.parametrize(("fields", "found", "hint"), FAULTS)
def test_a_fault_names_line_pair_key_and_what_is_allowed(load: Load, fields: str, found: str, hint: str) -> None:
    said = fault(load, of_pair(fields))
    assert found in said and hint in said and ", line " in said


def test_a_fault_outside_of_a_pair_names_its_line(load: Load) -> None:
    assert "line 2: the registry: pair is unknown (did you mean 'pairs'?)" in fault(load, "schema: 1\npair: []\n")
    assert "line 1: the registry: schema must be one of 1, got 2 (this version reads" in fault(load, "schema: 2\n")
    assert "line 3: " in fault(load, 'schema: 1\npairs:\n  - target: "../x"\n    drafter: a/b\n')
    assert "line 3: a pair: has either" in fault(load, "schema: 1\npairs:\n  - drafter: a/b\n")


@pytest.mark.parametrize(
    "content",
    [
        "a: &a [x, x]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]\nd: [*c, *c, *c]\n",
        "schema: 1\npairs: " + "[" * 3000 + "]" * 3000 + "\n",
        "schema: 1\npairs: " + "{a: " * 3000 + "}" * 3000 + "\n",
        "schema: 1\npairs: " + "\n".join(" " * i + "-" for i in range(800)) + "\n",
        "&top\nschema: 1\npairs: [*top]\n",
        "schema: 1\npairs: *nothing\n",
        "? [a, b]\n: c\n",
    ],
)
def test_bombs_cost_no_time_and_no_memory(load: Load, content: str) -> None:
    began = time.process_time()
    said = fault(load, content)
    assert time.process_time() - began < 1
    tracemalloc.start()
    try:
        fault(load, content)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    assert ", line " in said


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.mkdir [ran]", "!!str x", "!own x", "!!python/name:os.system"]
)
def test_tags_are_refused_and_run_nothing(
    load: Load, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = fault(load, of_pair(f"notes: {tag}"))
    assert "line 5: tag" in said and not (tmp_path / "ran").exists()


def test_a_byte_order_mark_and_crlf_are_fine_other_encodings_are_not(load: Load) -> None:
    good = of_pair("notes: grün")
    assert load(good.replace("\n", "\r\n").encode("utf-8-sig")).rows == load(good).rows
    assert "line 1: byte 0xff is not UTF-8" in fault(load, good.encode("utf-16"))
    assert "line 5: byte 0xfc is not UTF-8" in fault(load, good.encode("latin-1"))
    assert "line 5: control character '\\x00'" in fault(load, good.replace("ü", "\0"))
    assert "line 5: control character '\\x1b'" in fault(load, good.replace("ü", "\x1b"))
    said = fault(load, good.replace("    notes", "\tnotes"))
    assert "line 5" in said and "spaces, not tabs" in said


def test_a_revision_is_a_commit_a_branch_or_null(load: Load) -> None:
    for revision in ("0" * 39 + "a", "main", "refs/pr/3", "v1.0"):
        row = load(of_pair(f"revisions: {{target: {revision}}}")).find("a/b")
        assert row and row.target and row.drafter
        assert row.target.revision == revision and row.drafter.revision is None


def test_escape_sequences_and_newlines_are_shown_not_sent(load: Load) -> None:
    row = load(of_pair(r'notes: "red \e[31m, a\nb, \u202E\u2066, \a"')).find("a/b")
    assert row and row.notes.isprintable() and "\x1b" not in row.notes and "␛[31m" in row.notes and "␊" in row.notes
    for fields in (r'family: "\e[2J"', r'licence: "\u202E"'):
        found = load(of_pair(fields)).find("a/b")
        assert found and (found.family + (found.licence or "")).isprintable()


def test_the_users_file_changes_rows_and_is_marked(load: Load, tmp_path: Path) -> None:
    load(of_pair("notes: kept\nsizes_gib: {target: 1, drafter: 2}\nrevisions: {target: main}\naliases: [old]"))
    own = tmp_path / "own.yaml"
    own.write_text(
        "schema: 1\npairs:\n"
        "  - {target: A/B, sizes_gib: {drafter: 3}, aliases: [mine], fingerprints: [{layers: 2}]}\n"
        "  - {target: e/f, drafter: g/h}\n"
    )
    rows = registry.load(own)
    row, added = rows.find("mine"), rows.find("e/f")
    assert row and added and len(rows.rows) == 2 and row.overridden and added.overridden
    assert (row.name, row.notes, row.target_gib, row.drafter_gib) == ("a/b", "kept", 1, 3)
    assert row.target and row.target.revision == "main" and rows.find("old") is None
    own.write_text("schema: 1\npairs:\n  - {target: a/b, notes: null, kind: null}\n")
    found = registry.load(own).find("a/b")
    assert found and (found.notes, found.kind) == ("", "dflash"), "a key that is null is one that is not there"
    own.write_text("schema: 1\npairs:\n  - {target: a/b, contxt: 7}\n")
    with pytest.raises(SettingsError, match=r"own\.yaml, line 3: a/b: contxt is unknown"):
        registry.load(own)
    assert not any(row.overridden for row in registry.load(tmp_path / "no such.yaml").rows)


def test_thousands_of_pairs_are_read_and_a_large_file_is_not(load: Load, tmp_path: Path) -> None:
    count = 10_000 if hasattr(yaml, "CSafeLoader") else 100  # the Python parser takes a while
    many = "".join(f"  - {{target: owner/model-{i:05}, drafter: owner/model-{i:05}-DFlash}}\n" for i in range(count))
    assert load(f"schema: 1\npairs:\n{many}").find(f"MODEL-{count // 2:05}")
    with (tmp_path / "registry.yaml").open("wb") as file:
        file.truncate(50_000_000)
    with pytest.raises(SettingsError, match="larger than 1,000,000 bytes"):
        registry.load()
    assert "is larger than" in fault(load, b"#" * 1_000_001)
