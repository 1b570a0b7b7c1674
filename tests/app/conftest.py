"""The commands are the way in here, too: their fixtures."""

from __future__ import annotations

from tests.cli.conftest import answers, chats, cli, local, opened, serving, toy_hub, toys  # noqa: F401
