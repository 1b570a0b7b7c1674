"""Chats on disk: crashes, two writers, full disks, newer versions."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.errors import BusyError, DFlashError, UsageError
from dflash_local.store import history
from dflash_local.store.history import ChatFile, Recorder
from dflash_local.store.paths import chat_path, chats_folder
from dflash_local.store.records import Turn, decode, encode, encode_chat, encode_turn

TURNS = (
    Turn("user", "Zwölf Äpfel?\nund 🍎"),
    Turn("assistant", "Ja.\u2028\x85\x1b[31m", "hm", True, {"tokens": 3, "tokens_per_s": 12.5}),
    Turn("user", "more"),
    Turn("assistant", "again"),
)


def write_chat(folder: Path, turns: tuple[Turn, ...] = TURNS) -> Path:
    chat = ChatFile.create(folder, "demo", "be brief", turns[:1])
    for turn in turns[1:]:
        chat.turn(turn)
    chat.close()
    return chat.path


def test_a_chat_comes_back_as_it_was(tmp_path: Path) -> None:
    chat = decode(write_chat(tmp_path).read_bytes())
    assert (chat.model, chat.system, chat.turns) == ("demo", "be brief", TURNS)
    assert (chat.bad_lines, chat.newer, chat.last_seq) == (0, False, 4)


def test_a_kill_at_every_byte_loses_at_most_the_last_record(tmp_path: Path) -> None:
    raw = write_chat(tmp_path / "whole", TURNS[:2]).read_bytes()
    path = tmp_path / "cut" / "chat.jsonl"
    path.parent.mkdir()
    for offset in range(len(raw) + 1):
        path.write_bytes(raw[:offset])
        bad = path.with_name("chat.jsonl.bad")
        bad.unlink(missing_ok=True)
        complete = max(0, raw[:offset].count(b"\n") - 1)
        file, chat = ChatFile.resume(path)
        assert chat.turns[:complete] == TURNS[:complete] and len(chat.turns) <= complete + 1
        cut = raw[:offset].rpartition(b"\n")[2]
        assert bad.exists() == bool(chat.bad_lines) and (not bad.exists() or bad.read_bytes() == cut + b"\n")
        file.turn(Turn("user", "after the crash"))
        file.close()
        again = decode(path.read_bytes())
        assert again.turns == (*chat.turns, Turn("user", "after the crash")) and again.bad_lines == 0


def test_a_bad_line_in_the_middle_is_passed_over_and_counted() -> None:
    lines = encode_chat("demo", "", TURNS).split(b"\n")
    for junk in (
        b"\x00\xff",
        b"[1]",
        b'{"kind": "turn"}',
        b"{" * 5000,
        b'{"version":1,"seq":9,"kind":"turn","role":"x"}',
    ):
        chat = decode(b"\n".join([*lines[:3], junk, *lines[3:]]))
        assert chat.turns == TURNS and chat.bad_lines == 1


def test_the_file_survives_a_real_kill(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from dflash_local.store.history import ChatFile\n"
        "from dflash_local.store.records import Turn\n"
        "chat = ChatFile.create(Path(sys.argv[1]), 'demo', '', [Turn('user', 'one')])\n"
        "chat.turn(Turn('assistant', 'two'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, cwd=Path.cwd())
    assert killed.returncode == -9
    (path,) = tmp_path.glob("*.jsonl")
    file, chat = ChatFile.resume(path)  # the lock went with the process
    file.close()
    assert [turn.content for turn in chat.turns] == ["one", "two"]


def test_a_chat_that_is_open_elsewhere_is_not_appended_to(tmp_path: Path) -> None:
    path = write_chat(tmp_path)
    first, _ = ChatFile.resume(path)
    with pytest.raises(BusyError, match="open in another"):
        ChatFile.resume(path)
    warnings: list[str] = []
    recorder = Recorder(tmp_path, warnings.append)
    recorder.go_on(path)
    recorder.turn("demo", "", [*TURNS, Turn("user", "mine")])
    first.turn(Turn("user", "theirs"))
    first.close()
    assert len(warnings) == 1 and recorder.name not in (None, path.stem)
    recorder.close()
    assert decode(path.read_bytes()).turns == (*TURNS, Turn("user", "theirs"))
    assert decode(chat_path(tmp_path, str(recorder_name(tmp_path, path))).read_bytes()).turns[-1].content == "mine"


def recorder_name(folder: Path, other: Path) -> str:
    (name,) = [entry.name for entry in history.entries(folder) if entry.name != other.stem]
    return name


def full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_warning_and_the_chat_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    recorder = Recorder(tmp_path, warnings.append)
    recorder.turn("demo", "", TURNS[:1])
    path = chat_path(tmp_path, str(recorder.name))
    real = os.write
    written: list[int] = []

    def half(descriptor: int, data: bytes) -> int:
        if written:
            full_disk()
        written.append(real(descriptor, bytes(data)[: len(data) // 2]))
        return written[-1]

    monkeypatch.setattr(os, "write", half)
    for count in (2, 3, 4):
        recorder.turn("demo", "", TURNS[:count])
    recorder.record("drop", count=1)
    assert len(warnings) == 1 and "No space left" in warnings[0]
    chat = decode(path.read_bytes())
    assert chat.turns == TURNS[:1] and chat.bad_lines == 0, "no half line stays"


def test_no_home_is_one_warning() -> None:
    warnings: list[str] = []
    recorder = Recorder(chats_folder(settings.load({})), warnings.append)
    recorder.turn("demo", "", TURNS[:1])
    recorder.turn("demo", "", TURNS[:2])
    assert len(warnings) == 1 and "HOME is not set" in warnings[0]


def test_without_history_nothing_is_written_or_said(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, pytest.fail, keep=False)
    recorder.turn("demo", "", TURNS[:1])
    recorder.go_on(tmp_path / "chat.jsonl")
    assert recorder.name is None and list(tmp_path.iterdir()) == []


def newer_chat(folder: Path) -> Path:
    path = chat_path(folder, "future")
    lines = encode_chat("demo", "", TURNS) + encode_turn(5, Turn("user", "x")).replace(b'"version": 1', b'"version": 2')
    path.write_bytes(lines + encode("hologram", 6, beam=3))
    return path


def test_a_newer_chat_is_read_and_never_written(tmp_path: Path) -> None:
    path = newer_chat(tmp_path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="newer version"):
        ChatFile.resume(path)
    warnings: list[str] = []
    recorder = Recorder(tmp_path, warnings.append)
    recorder.go_on(path)
    turns = [*decode(before).turns, Turn("user", "mine")]
    recorder.turn("demo", "", turns)
    assert len(turns) == 6 and "only read" in warnings[0]
    assert path.read_bytes() == before and recorder.name != path.stem


def test_history_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = write_chat(tmp_path / "data" / "chats")
        path.write_bytes(path.read_bytes()[:-3])
        ChatFile.resume(path)[0].close()
    finally:
        os.umask(before)
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file.name
    assert len(list(path.parent.iterdir())) == 2
    for folder in (path.parent, path.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_order_is_that_of_the_numbers() -> None:
    head, *lines = encode_chat("demo", "", TURNS).splitlines(keepends=True)
    assert decode(b"".join([head, *reversed(lines)])).turns == TURNS


def test_drop_and_system_records_change_what_came_before() -> None:
    raw = encode_chat("demo", "old", TURNS) + encode("drop", 5, count=2) + encode("system", 6, content="new")
    chat = decode(raw + encode("drop", 7, count="all"))
    assert chat.turns == TURNS[:2] and chat.system == "new"


def test_a_chat_is_saved_and_loaded_by_name_and_not_overwritten(tmp_path: Path) -> None:
    raw = encode_chat("demo", "", TURNS)
    path = history.save(tmp_path, "mine", raw, replace=False)
    assert history.load(tmp_path, "mine") == (path, decode(raw)) and [
        entry.name for entry in history.entries(tmp_path)
    ] == ["mine"]
    with pytest.raises(UsageError, match="already"):
        history.save(tmp_path, "mine", b"", replace=False)
    history.save(tmp_path, "mine", encode_chat("demo", "", ()), replace=True)
    assert history.load(tmp_path, "mine")[1].turns == ()
    with pytest.raises(UsageError, match="no chat 'other'"):
        history.load(tmp_path, "other")
    with pytest.raises(UsageError):
        history.load(None, "mine")
    with pytest.raises(DFlashError, match="no home"):
        history.save(None, "mine", raw, replace=False)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a\nb", "x" * 65, "a\\b", "\x1b[2J"])
def test_a_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="name of a chat"):
        chat_path(tmp_path, name)


@pytest.fixture
def odd_folder(tmp_path: Path) -> Path:
    """A chat, and what may lie beside it."""
    history.save(tmp_path, "mine", encode_chat("demo", "", TURNS), replace=False)
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "gone")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    (tmp_path / "linked.jsonl").symlink_to(tmp_path / "mine.jsonl")
    (tmp_path / "endless.jsonl").symlink_to("/dev/zero")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "two\nlines.jsonl").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.jsonl")
    return tmp_path


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes as on POSIX")
def test_what_is_no_chat_is_not_listed(odd_folder: Path) -> None:
    assert sorted([entry.name for entry in history.entries(odd_folder)]) == ["linked", "mine"]
    assert history.load(odd_folder, "linked")[1].turns == TURNS
    assert history.entries(odd_folder / "nowhere") == [] == history.entries(None)
    with pytest.raises(DFlashError, match="cannot be read"):
        history.entries(odd_folder / "mine.jsonl")


@pytest.mark.timeout(20)
@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes as on POSIX")
@pytest.mark.parametrize("name", ["dangling", "loop", "folder", "pipe", "endless"])
def test_what_is_no_chat_is_refused_in_one_line_and_not_waited_for(odd_folder: Path, name: str) -> None:
    with pytest.raises(DFlashError, match=f"{name}.*cannot be read|no chat '{name}'"):
        history.load(odd_folder, name)
    warnings: list[str] = []
    recorder = Recorder(odd_folder, warnings.append)
    recorder.go_on(odd_folder / f"{name}.jsonl")
    assert len(warnings) == 1 and "not kept" in warnings[0] and recorder.name is None


def test_the_list_of_chats_has_titles_and_finds_words(tmp_path: Path) -> None:
    long = "Tell me, please, how rivers find\n\ttheir way to the sea, and why they wind so much"
    first = ChatFile.create(
        tmp_path, "demo", "", [Turn("user", long), Turn("assistant", 'Say "kind": "turn" aloud, Ü')]
    )
    first.record("model", content="other")
    first.record("drop", count=1)
    first.turn(Turn("assistant", "Downhill"))
    first.close()
    history.save(tmp_path, "mine", encode_chat("demo", "", TURNS), replace=False)
    for index, path in enumerate((first.path, tmp_path / "mine.jsonl")):
        os.utime(path, (1000 + index, 1000 + index))
    (tmp_path / "foreign.jsonl").write_bytes(b'{"messages": []}\n' * 3)
    (tmp_path / "empty.jsonl").write_bytes(b"")
    mine, rivers = history.entries(tmp_path)
    assert (mine.name, mine.title, mine.turns, mine.modified) == ("mine", "mine", 4, 1001)
    assert (rivers.title, rivers.model, rivers.turns) == (
        "Tell me, please, how rivers find their way to the sea, and …",
        "other",
        2,
    )
    for words, wanted in (("DOWNHILL", [rivers]), ("zwölf ÄPFEL?\nund", [mine]), ("aloud", []), ("content", [])):
        assert history.entries(tmp_path, words) == wanted, words
    assert history.find(tmp_path, "tell ME").name == rivers.name and history.find(tmp_path, "mine") == mine
    with pytest.raises(UsageError, match="no chat 'sea'"):
        history.find(tmp_path, "sea")


def test_a_chat_is_renamed_while_it_is_open_and_deleted_only_when_it_is_not(tmp_path: Path) -> None:
    path = write_chat(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])  # a crash before the line's end
    age = history.entries(tmp_path)[0].modified
    history.rename(tmp_path, path.stem, "apples\nand pears")
    file, chat = ChatFile.resume(path)
    history.rename(tmp_path, path.stem, "apples")
    file.turn(Turn("user", "on"))
    with pytest.raises(BusyError, match="open"):
        history.delete(tmp_path, path.stem)
    file.close()
    (entry,) = history.entries(tmp_path)
    assert entry.title == "apples" and chat.turns == TURNS and entry.turns == 5 and entry.modified >= age
    history.delete(tmp_path, path.stem)
    assert list(tmp_path.iterdir()) == []
    newer = newer_chat(tmp_path)
    with pytest.raises(UsageError, match="newer version"):
        history.rename(tmp_path, newer.stem, "x")


def test_a_chat_names_the_model_that_it_was_talked_to_last(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, pytest.fail)
    for count, model in enumerate(("one", "one", "two", "two"), 1):
        recorder.turn(model, "", TURNS[:count])
    recorder.close()
    (entry,) = history.entries(tmp_path)
    assert entry.model == "two" == history.load(tmp_path, entry.name)[1].model
    assert (tmp_path / f"{entry.name}.jsonl").read_bytes().count(b'"kind": "model"') == 1
