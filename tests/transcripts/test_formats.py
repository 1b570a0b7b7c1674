"""Each client's format, on small samples written out as the client writes them."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dflash_local.store.export import to_json
from dflash_local.store.history import ChatFile
from dflash_local.store.records import Turn as Said
from dflash_local.transcripts import turn
from dflash_local.transcripts.read import ReadReport, conversations
from dflash_local.transcripts.turn import TranscriptTurn

# What of a record is a column of OpenCode's database.
NAMES = {"id": "id", "sessionID": "session_id", "messageID": "message_id"}


def read(folder: Path) -> tuple[list[str], list[TranscriptTurn]]:
    """Read a folder without a complaint; returns the client of each conversation, and all turns."""
    report, clients, turns = ReadReport(), list[str](), list[TranscriptTurn]()
    for client, found in conversations(folder, report, lambda _text, _part: None):
        clients.append(client)
        turns += found
    assert report.problems == []
    return clients, turns


def write_lines(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def claude(uuid: str, parent: str | None, kind: str, content: Any, **more: Any) -> dict[str, Any]:
    """One line of Claude Code; of an assistant ``of`` is its message's id."""
    message: dict[str, Any] = {"role": kind, "content": content}
    if kind == "assistant":
        message |= {"id": more.pop("of"), "type": "message", "model": "claude", "usage": {"input_tokens": 3}}
    common = {"parentUuid": parent, "isSidechain": False, "userType": "external", "cwd": "/p", "sessionId": "s"}
    line = {**common, "version": "2.1.0", "gitBranch": "main", "type": kind, "message": message, "uuid": uuid}
    return {**line, "timestamp": "2026-03-01T22:38:47.557Z", **more}


def result(call: str, content: Any) -> list[dict[str, Any]]:
    return [{"type": "tool_result", "tool_use_id": call, "content": content}]


def test_claude_code_puts_the_lines_of_a_message_together(tmp_path: Path) -> None:
    thought = [{"type": "thinking", "thinking": "two files", "signature": "x"}]
    reads = [[{"type": "tool_use", "id": name, "name": "Read", "input": {"path": name}}] for name in ("a", "b")]
    write_lines(
        tmp_path / "-p" / "s.jsonl",
        {"type": "file-history-snapshot", "messageId": "m", "snapshot": {}},
        claude("u1", None, "user", "read a and b"),
        claude("a1", "u1", "assistant", thought, of="msg_1"),
        claude("a2", "a1", "assistant", reads[0], of="msg_1"),
        claude("r1", "a2", "user", result("a", "text of a"), toolUseResult={"stdout": "text of a"}),
        claude("a3", "a2", "assistant", reads[1], of="msg_1"),
        claude("r2", "a3", "user", result("b", [{"type": "text", "text": "text of b"}])),
        claude("a4", "r2", "assistant", [{"type": "text", "text": "both read"}], of="msg_2"),
        claude("a5", "a4", "assistant", [{"type": "text", "text": "API Error"}], of="x", isApiErrorMessage=True),
    )
    clients, (first, second) = read(tmp_path)
    calls = tuple(f'{{"name": "Read", "arguments": {{"path": "{name}"}}}}' for name in ("a", "b"))
    assert clients == ["Claude Code"]
    assert first == TranscriptTurn(("read a and b",), ("two files", *calls), "msg_1", "", ("user",))
    assert second.prompt == ("read a and b", *calls, "text of a", "text of b")  # without what was thought
    assert second.reply == ("both read",)


def test_claude_code_goes_on_behind_a_compaction_and_from_an_earlier_prompt(tmp_path: Path) -> None:
    def said(text: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text}]

    boundary = {"type": "system", "subtype": "compact_boundary", "uuid": "c", "parentUuid": None, "sessionId": "s"}
    write_lines(
        tmp_path / "s.jsonl",
        claude("u1", None, "user", "one"),
        claude("a1", "u1", "assistant", said("first"), of="m1"),
        claude("u2", "a1", "user", "two"),
        claude("a2", "u2", "assistant", said("second"), of="m2"),
        claude("u3", "a1", "user", "another two"),  # typed after going back behind the first reply
        claude("a3", "u3", "assistant", said("third"), of="m3"),
        claude("side", None, "user", "look it up", isSidechain=True, agentId="agent-1"),
        claude("side2", "side", "assistant", said("found"), of="m4", isSidechain=True, agentId="agent-1"),
        {**boundary, "content": "Conversation compacted"},
        claude("u4", "c", "user", "a summary", isCompactSummary=True),
        claude("a4", "u4", "assistant", said("fourth"), of="m5"),
    )
    prompts = {each.message: (each.prompt, each.thread) for each in read(tmp_path)[1]}
    assert prompts == {
        "m1": (("one",), ""),
        "m2": (("one", "first", "two"), ""),
        "m3": (("one", "first", "another two"), ""),
        "m4": (("look it up",), "agent-1"),
        "m5": (("a summary",), ""),
    }


def codex(kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": "2026-06-01T06:59:34.781Z", "type": kind, "payload": payload}


def message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def test_codex_reads_items_and_no_events(tmp_path: Path) -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "no text of the model"}]}
    write_lines(
        tmp_path / "2026" / "rollout-1.jsonl",
        codex("session_meta", id="x", cwd="/p", base_instructions={"text": "You are Codex"}),
        codex("response_item", **message("user", "list files")),
        codex("event_msg", type="user_message", message="list files"),
        codex("turn_context", model="m"),
        codex("response_item", **thought, encrypted_content="xx"),
        codex("response_item", type="function_call", name="exec", arguments='{"cmd":"ls"}', call_id="1"),
        codex("response_item", type="custom_tool_call", name="apply_patch", input="*** Begin", call_id="2"),
        codex("response_item", type="function_call_output", call_id="1", output="a.py"),
        codex(
            "response_item", type="custom_tool_call_output", call_id="2", output=[{"type": "input_text", "text": "ok"}]
        ),
        codex("response_item", **message("assistant", "one file")),
        codex("event_msg", type="token_count", info={}),
        codex(
            "compacted", message="", replacement_history=[message("user", "list files"), message("assistant", "sum")]
        ),
        codex("response_item", type="reasoning", summary=[], content=[{"type": "reasoning_text", "text": "hm"}]),
        codex("response_item", **message("assistant", "done")),
    )
    clients, turns = read(tmp_path)
    calls = ('{"name": "exec", "arguments": {"cmd":"ls"}}', "apply_patch *** Begin")
    assert clients == ["Codex"]
    assert [(each.prompt, each.reply) for each in turns] == [
        (("You are Codex", "list files"), calls),
        (("You are Codex", "list files", *calls, "a.py", "ok"), ("one file",)),
        (("You are Codex", "list files", "sum"), ("hm", "done")),
    ]


@pytest.mark.parametrize("database", [False, True])
def test_opencode_puts_sessions_together_from_names(database: bool, tmp_path: Path) -> None:
    def put(path: str, **record: Any) -> None:
        if database:
            return put_row(path.partition("/")[0], record)
        file = tmp_path / "storage" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=2), encoding="utf-8")

    def put_row(table: str, record: dict[str, Any]) -> None:
        names = {NAMES[key]: record.pop(key) for key in NAMES if key in record}
        row = {**names, "time_created": record.get("time", {}).get("created", 0), "data": json.dumps(record)}
        with closing(sqlite3.connect(tmp_path / "opencode.db")) as connection, connection:
            connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(row)})")
            connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", tuple(row.values()))

    def put_message(name: str, created: int, role: str, **more: Any) -> None:
        put(f"message/ses_1/{name}.json", id=name, sessionID="ses_1", role=role, time={"created": created}, **more)

    def put_part(name: str, of: str, kind: str, **more: Any) -> None:
        put(f"part/{of}/{name}.json", id=name, messageID=of, sessionID="ses_1", type=kind, **more)

    put("session/global/ses_1.json", id="ses_1", projectID="global", title="t", time={"created": 1, "updated": 2})
    put_message("msg_a", 10, "user", summary={"title": "t", "diffs": []})
    put_part("prt_1", "msg_a", "text", text="list files")
    put_part("prt_2", "msg_a", "text", text="not sent", ignored=True)
    put_message("msg_b", 20, "assistant", parentID="msg_a")
    put_part("prt_3", "msg_b", "step-start")
    put_part("prt_4", "msg_b", "reasoning", text="hm", time={"start": 1})
    state = {"status": "completed", "input": {"command": "ls"}, "output": "a.py", "title": "ls"}
    put_part("prt_5", "msg_b", "tool", callID="c", tool="bash", state=state)
    put_part("prt_6", "msg_b", "text", text="one moment")
    put_part("prt_7", "msg_b", "step-start")
    put_part("prt_8", "msg_b", "text", text="one file")
    put_message("msg_c", 30, "assistant", parentID="msg_b", summary=True)
    put_part("prt_9", "msg_c", "text", text="sum")
    put_message("msg_d", 40, "user")
    put_part("prt_a", "msg_d", "text", text="go on")
    put_message("msg_e", 50, "assistant")
    put_part("prt_b", "msg_e", "text", text="done")
    clients, turns = read(tmp_path)
    call = '{"name": "bash", "arguments": {"command": "ls"}}'
    assert clients == ["OpenCode"]
    assert [(each.prompt, each.reply) for each in turns] == [
        (("list files",), ("hm", call, "one moment")),
        (("list files", call, "one moment", "a.py"), ("one file",)),
        (("list files", call, "one moment", "a.py", "one file"), ("sum",)),
        (("sum", "go on"), ("done",)),
    ]


def test_open_webui_reads_the_way_to_the_current_message(tmp_path: Path) -> None:
    reasoning = '<details type="reasoning" done="true" duration="1">\n<summary>Thought</summary>\n&gt; hm\n</details>'
    tool = '<details type="tool_calls" done="true" name="search" result="found">\n</details>'
    tree = {
        "1": {"id": "1", "parentId": None, "childrenIds": ["2", "3"], "role": "user", "content": "hi"},
        "2": {"id": "2", "parentId": "1", "childrenIds": [], "role": "assistant", "content": "another reply"},
        "3": {"id": "3", "parentId": "1", "role": "assistant", "content": f"{reasoning}\nlet me see\n{tool}\nhello"},
        "4": {"id": "4", "parentId": "3", "role": "user", "content": "thanks"},
        "5": {"id": "5", "parentId": "4", "role": "assistant", "content": "welcome", "done": True},
    }
    chat = {"title": "t", "params": {"system": "Be kind"}, "history": {"messages": tree, "currentId": "5"}}
    round_trip = {"a": {"id": "a", "parentId": "a", "role": "user", "content": "for ever"}}
    hostile = {"history": {"messages": round_trip, "currentId": "a"}}
    (tmp_path / "chats.json").write_text(json.dumps([{"id": "c", "chat": chat}, {"chat": hostile}, {"chat": chat}]))
    clients, turns = read(tmp_path)
    assert clients == ["Open WebUI"] * 3
    assert [(each.prompt, each.reply) for each in turns[:3]] == [
        (("Be kind", "hi"), (reasoning, "let me see")),
        (("Be kind", "hi", "let me see", tool), ("hello",)),
        (("Be kind", "hi", "let me see", tool, "hello", "thanks"), ("welcome",)),
    ]
    assert turns[3:] == turns[:3]


def test_own_chats_are_read_as_kept_and_as_exported(tmp_path: Path) -> None:
    said = [Said("user", "hi"), Said("assistant", "hello", thinking="hm")]
    (tmp_path / "talk.json").write_text(to_json("m", "Be kind", said), encoding="utf-8")
    exported = read(tmp_path)
    assert exported == (["dflash"], [TranscriptTurn(("Be kind", "hi"), ("hm", "hello"), "", "", ("system", "user"))])
    (tmp_path / "talk.json").unlink()
    chat = ChatFile.create(tmp_path / "chats", "m", "Be kind", said)
    chat.record("drop", count=1)  # another reply is asked for
    chat.turn(Said("assistant", "good day"))
    chat.record("system", content="Be short")
    chat.turn(Said("user", "thanks"))
    chat.turn(Said("assistant", "welcome"))
    chat.close()
    _, turns = read(tmp_path)
    assert turns[0] == exported[1][0]
    assert turns[1] == TranscriptTurn(("Be kind", "hi"), ("good day",), "", "", ("system", "user"))
    assert turns[2] == TranscriptTurn(
        ("Be short", "hi", "good day", "thanks"), ("welcome",), "", "", ("system", "user", "assistant", "user")
    )


def test_subagents_that_are_over_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "MOST_CHARS", 1500)
    lines = [claude("u", None, "user", "one")]
    for number in range(9):
        agent = {"isSidechain": True, "agentId": f"agent-{number}"}
        lines.append(claude(f"p{number}", None, "user", "x" * 300, **agent))
        said = [{"type": "text", "text": "found"}]
        lines.append(claude(f"r{number}", f"p{number}", "assistant", said, of=f"m{number}", **agent))
    lines.append(claude("a", "u", "assistant", [{"type": "text", "text": "first"}], of="last"))
    write_lines(tmp_path / "s.jsonl", *lines)
    turns = read(tmp_path)[1]
    assert sorted(each.message for each in turns) == ["last", *(f"m{number}" for number in range(9))]
    assert next(each for each in turns if each.message == "last").prompt == ("one",)
