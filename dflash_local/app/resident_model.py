"""A pair as the resident service keeps it, for the endpoint and the page."""

from __future__ import annotations

from collections.abc import Callable

from dflash_local.app.attaching import attached
from dflash_local.app.load_planning import planned_context
from dflash_local.app.loading import open_held
from dflash_local.app.models import registry
from dflash_local.app.notices import Notify
from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.generation_config import sampling_defaults
from dflash_local.chat.tokenizer_files import chat_template
from dflash_local.chat.tool_calls import GENERAL_FORM, format_of
from dflash_local.checkpoint_files.source import is_on_disk, open_source
from dflash_local.events import LoadProgress, Notice
from dflash_local.load_config import LoadConfig
from dflash_local.service.resident import Load, Model
from dflash_local.service.service import Session
from dflash_local.settings import Settings


def model_of(
    pair: Pair, load: LoadConfig, user: Settings, notify: Notify, thinking: bool, attach_from: str | None = None
) -> Model:
    """A pair that is loaded when it is asked for. Its id is a name, never a path of this machine.

    Args:
        attach_from: the address of the server that asks, when another one may lend the pair.
    """
    source = open_source(pair.target)
    parts = source.tokenizer()
    name, aliases = names_of(pair, user)
    return Model(
        name=name,
        load=loader(pair, load, user, notify, attach_from),
        aliases=aliases,
        sampling=sampling_defaults(source, pair.sampling),
        thinking=thinking,
        mode="dflash" if load.draft else "ar",
        call_format=format_of(None if parts is None else chat_template(parts)) or GENERAL_FORM,
        context=planned_context(pair, load, user),
    )


def loader(pair: Pair, load: LoadConfig, user: Settings, notify: Notify, attach_from: str | None = None) -> Load:
    """How the resident service loads a pair; see ``model_of``."""

    def opened(progress: Callable[[LoadProgress], None]) -> Session:
        elsewhere = attached(pair, load, user, notify, attach_from) if attach_from is not None else None
        if elsewhere is not None:
            return elsewhere

        def forward(event: Notice | LoadProgress) -> None:
            if isinstance(event, LoadProgress):
                progress(event)
            else:
                notify(event)

        return open_held(pair, load, user, forward)

    return opened


def names_of(pair: Pair, user: Settings) -> tuple[str, tuple[str, ...]]:
    """What a pair's id is, never a path of this machine, and its aliases of the registry's row."""
    if is_on_disk(pair.name):
        return pair.target.resolve().name or "model", ()
    row = registry(user).find(pair.name)
    return pair.name, tuple(name for name in (row.aliases if row is not None else ()) if name != pair.name)
