"""What is private is taken out of texts, and what a report is for stays in."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.report.scrub import Secrets, scrub, scrubbed, secrets_of

NOTHING = Secrets()


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("cannot read /data/models/target/config.json", "models"),
        ("'/mnt/My Own Disk/Secret Project/x' is gone", "Project"),
        ("gone: /mnt/My Own Disk/Secret Project/x (denied)", "Project"),
        ("~/own/thing", "thing"),
        (r"C:\Users\alice\models", "alice"),
        ("D:/alice/models", "alice"),
        (r"\\server\share\alice", "alice"),
        (r"D:\work\<user>\secret", "secret"),
        ("/data/some <user> folder", "folder"),
        ("gsk_abcdefghijkl", "abcdefgh"),
        ("nvapi-abcdefghijkl", "abcdefgh"),
        ("r8_abcdefghijkl", "abcdefgh"),
        ("password: correct horse", "horse"),
        ('{"api_key": "hunter2"}', "hunter2"),
        ("hf_abcdefghijklmnop", "abcdefgh"),
        ("key sk-proj-abcdefgh12345678", "abcdefgh"),
        ("Authorization: Bearer abc.def-12345", "abc.def"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIi.sig", "eyJ"),
        ("0123456789abcdef0123456789abcdef", "0123456789abcdef"),
        ("Zm9vYmFyYmF6cXV4Zm9vYmFyYmF6cXV4MTIz", "Zm9v"),
        ("GPU-5f2c8a1e-1111-2222-3333-444455556666", "5f2c8a1e"),
        ("at 192.168.17.4:8000", "192.168"),
        ("at 2001:db8::17", "db8"),
        ("from aa:bb:cc:dd:ee:ff", "aa:bb"),
        ("mail alice.b@example.co.uk now", "alice"),
        ("https://user:pw@hub.corp.example/x?token=1", "corp"),
    ],
)
def test_private_texts_go(text: str, secret: str) -> None:
    assert secret in text and secret not in scrub(text, NOTHING)


@pytest.mark.parametrize(
    "text",
    [
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "NVIDIA H200, driver 580.159.04, compute 9.0",
        "2026-11-20T12:34:56Z",
        "int4 24576 x 4096 at 16 rows",
        "FragmentGemmConfig(warps_k=16, warps_n=2, num_stages=4)",
        "-DCODES=2 -DGROUP_SIZE=128 N=4096 TAIL=0",
        "engine/session.py:84 in load",
        "Linux-6.8.0-45-generic-x86_64-with-glibc2.39",
        "3.1 GiB free of 4.0 GiB; 100 tok/s",
        "pip install 'torch>=2.11'",
    ],
)
def test_what_a_report_is_for_stays(text: str) -> None:
    assert scrub(text, NOTHING) == text


def test_secrets_come_from_variables_folders_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "kite-lab.example")
    home = tmp_path / "alice"
    env = {"HOME": str(home), "MY_API_KEY": "pa55word!", "USER": "Alice", "HF_TOKEN": "plainword", "DFLASH_PORT": "80"}
    secrets = secrets_of(settings.load(env), folders=[Path("models") / "Zebra-7B"])
    private = ("pa55word!", "plainword", "ALICE", "aLiCe's", "alice_x", "KITE-lab", "zebra-7b", f"{home}/x y")
    for text in (*private, f"{home}/{private[0]}/and", rf"D:\work\Alice\{private[1]}\and"):
        kept = scrub(f"before {text}", secrets).lower()
        assert kept.startswith("before <") and not any(
            word in kept for word in ("word", "alice", "kite", "zebra", "and")
        )
    assert scrub("malice 80", secrets) == "malice 80", "whole words, and no numbers"


def test_secrets_in_and_over_each_other_leave_nothing() -> None:
    inside, whole, over = "middle", "left-middle-right", "right-beyond"
    for values in ((inside, whole, over), (over, whole, inside)):
        secrets = Secrets(dict.fromkeys(values, "<token>"))
        assert scrub("a left-middle-right-beyond b middle c", secrets) == "a <token> b <token> c"
    assert scrub("an ababa b", Secrets({"aba": "<token>"})) == "an <token> b"


def test_every_text_of_a_value_is_scrubbed_and_fields_keep_their_names() -> None:
    value = {"path": ["/a/b", {"/c/d": ("hf_abcdefghijk", 3, None, True)}], "name": Path("/e/f")}
    assert scrubbed(value, Secrets(names={"name": "<user>"})) == {
        "path": ["<path>", {"<path>": ["<token>", 3, None, True]}],
        "name": "<path>",
    }
