"""A chat whose replies come from a vLLM or SGLang server: other models are those that it serves, or is launched for."""

from __future__ import annotations

from dflash_local.app.chat_session import ChatSession
from dflash_local.app.engine_server import ReplySource, starter
from dflash_local.catalog.bundled import Pair
from dflash_local.load_config import LoadConfig
from dflash_local.service.chat_options import ChatOptions
from dflash_local.settings import Settings


class ServerChat(ChatSession):
    """``ChatSession`` over a server.

    Args:
        drafter: that the server is to draft with, instead of the registry's.
    """

    loads_here = False

    def __init__(
        self,
        server: ReplySource,
        drafter: str | None,
        pair: Pair,
        options: ChatOptions,
        user: Settings,
        keep: bool = True,
    ) -> None:
        super().__init__(pair, user.load_config, options, user, keep, starter(server, drafter))
        self._server = server

    def resolve(self, model: str, drafter: str | None, load: LoadConfig | None = None) -> Pair:
        """The pair that a name means; nothing of it is downloaded."""
        return self._server.pair(model, drafter, self.user)
