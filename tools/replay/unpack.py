"""Reads a report's zip file: with limits, and never unpacked onto a disk."""

from __future__ import annotations

import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

from dflash_local.json_text import parse_json
from dflash_local.report.archive import SCHEMA

MAIN = "report"
MAX_ARCHIVE = 8 * 2**20  # bytes
MAX_PART = 8 * 2**20
MAX_PARTS = 32
_MEMBER = re.compile(r"([a-z][a-z_]{0,31})\.json")


class Damaged(Exception):
    """A file that is no report, or a damaged one."""


def unpack(path: Path) -> dict[str, Any]:
    """Read the parts of an archive by name, ``report`` among them. Damaged: it is no report. OSError: no file."""
    if path.stat().st_size > MAX_ARCHIVE:
        raise Damaged(f"{path} is larger than {MAX_ARCHIVE // 2**20} MiB: no report")
    try:
        with zipfile.ZipFile(path) as archive:
            parts = _parts(archive, path)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise Damaged(f"{path} is damaged or no report: {type(error).__name__}") from error
    main = parts.get(MAIN)
    schema = main.get("schema") if isinstance(main, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise Damaged(f"{path} holds no report: {MAIN}.json tells no schema")
    if schema != SCHEMA:
        raise Damaged(f"{path} has schema {schema}; this version reads {SCHEMA}")
    return parts


def _parts(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    members = archive.infolist()
    if len(members) > MAX_PARTS:
        raise Damaged(f"{path} holds {len(members)} files: no report")
    parts: dict[str, Any] = {}
    left = MAX_PART
    for member in members:
        found = _MEMBER.fullmatch(member.filename)
        if found is None or found[1] in parts:
            raise Damaged(f"{path} holds {member.filename[:60]!r}, which no report does")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise Damaged(f"{path} is compressed in another way than a report")
        with archive.open(member) as file:
            content = file.read(left + 1)  # what the header says of its size may be wrong
        left -= len(content)
        if left < 0:
            raise Damaged(f"{path} unpacks to more than {MAX_PART // 2**20} MiB: no report")
        try:
            parts[found[1]] = parse_json(content)
        except ValueError as error:
            raise Damaged(f"{path}: {member.filename} is not JSON") from error
    return parts
