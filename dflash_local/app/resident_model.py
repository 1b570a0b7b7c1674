"""A pair as the resident service keeps it, for the endpoint and the page."""

from __future__ import annotations

from collections.abc import Callable

from dflash_local.app.load_planning import planned_context
from dflash_local.app.loading import open_for_replies
from dflash_local.app.models import registry
from dflash_local.app.notices import Notify
from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.generation_config import sampling_defaults
from dflash_local.chat.tokenizer_files import chat_template
from dflash_local.chat.tool_calls import GENERAL_FORM, format_of
from dflash_local.checkpoint_files.source import is_on_disk, open_source
from dflash_local.events import LoadProgress, Notice
from dflash_local.load_config import LoadConfig
from dflash_local.service.resident import Model
from dflash_local.service.service import Session
from dflash_local.settings import Settings


def model_of(pair: Pair, load: LoadConfig, user: Settings, notify: Notify, thinking: bool) -> Model:
    """A pair that is loaded when it is asked for. Its id is a name, never a path of this machine."""
    source = open_source(pair.target)
    parts = source.tokenizer()
    name, aliases = names_of(pair, user)

    def opened(progress: Callable[[LoadProgress], None]) -> Session:
        def forward(event: Notice | LoadProgress) -> None:
            if isinstance(event, LoadProgress):
                progress(event)
            else:
                notify(event)

        return open_for_replies(pair, load, user, forward)

    return Model(
        name=name,
        load=opened,
        aliases=aliases,
        sampling=sampling_defaults(source, pair.sampling),
        thinking=thinking,
        mode="dflash" if load.draft else "ar",
        call_format=format_of(None if parts is None else chat_template(parts)) or GENERAL_FORM,
        context=planned_context(pair, load, user),
    )


def names_of(pair: Pair, user: Settings) -> tuple[str, tuple[str, ...]]:
    """What a pair's id is, never a path of this machine, and its aliases of the registry's row."""
    if is_on_disk(pair.name):
        return pair.target.resolve().name or "model", ()
    row = registry(user).find(pair.name)
    return pair.name, tuple(name for name in (row.aliases if row is not None else ()) if name != pair.name)
