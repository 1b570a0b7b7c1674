"""What the page asks of the command line: registry, downloads, removal, measuring, and what this machine is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_local.bench.prompts import Prompt, built_in
from dflash_local.catalog.bundled import Pair
from dflash_local.cli.offers import offers
from dflash_local.cli.session import LoadWish
from dflash_local.events import Notice, PullProgress
from dflash_local.service.resident import Resident
from dflash_local.settings import Settings
from dflash_local.ui.offers import Offer


class WebDesk:
    """See ``ui.web.desk.Desk``."""

    def __init__(self, resident: Resident, pair: Pair, wish: LoadWish, user: Settings) -> None:
        self._resident, self._pair, self._wish, self._user = resident, pair, wish, user

    @property
    def resident(self) -> Resident:
        return self._resident

    @property
    def notes(self) -> Sequence[str]:
        return ()

    def offers(self) -> Sequence[Offer]:
        return offers(self._user)

    def bench_prompts(self) -> Sequence[Prompt]:
        return built_in()

    def details(self, name: str) -> str:
        raise NotImplementedError

    def pull(self, name: str, hear: Callable[[PullProgress | Notice], None], cancelled: Callable[[], bool]) -> None:
        raise NotImplementedError

    def removal(self, name: str) -> str:
        raise NotImplementedError

    def remove(self, name: str) -> str:
        raise NotImplementedError

    def about(self) -> Mapping[str, str]:
        raise NotImplementedError

    def certify(self, hear: Callable[[str, float], None], cancelled: Callable[[], bool]) -> Mapping[str, Any]:
        raise NotImplementedError
