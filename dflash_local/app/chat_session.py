"""A chat on a terminal, by line or on a screen: the conversation, the pair that is loaded for it, its commands."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local.app.chat_commands import ALIASES, COMMANDS, ChatCommand
from dflash_local.app.load_choices import LoadChoice
from dflash_local.app.model_catalog import ModelCatalog
from dflash_local.app.model_sources import ModelSource
from dflash_local.app.notices import Notify
from dflash_local.app.thinking import thinking_notice
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import UsageError
from dflash_local.events import LoadProgress, Mode, Notice
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.service.backend import Backend, Model
from dflash_local.service.chat_options import ChatOptions
from dflash_local.service.conversation import Conversation
from dflash_local.service.service import Service
from dflash_local.settings import Settings
from dflash_local.store import history
from dflash_local.store.history import Recorder
from dflash_local.store.paths import chats_folder
from dflash_local.tables import counted
from dflash_local.terminal import safe_line

if TYPE_CHECKING:
    from dflash_local.planner.occupancy import Occupancy


class ChatSession(ModelCatalog):
    """One chat; ``open`` loads its pair, ``close`` frees it.

    Args:
        pair: to begin with. load: how pairs are loaded. keep: record the chat on disk.

    Attributes:
        folder: where chats are kept. saved: names that this chat was saved under.
        bar: a character to draw histograms with.
    """

    def __init__(
        self,
        models: ModelSource,
        pair: Pair,
        load: LoadConfig,
        options: ChatOptions,
        user: Settings,
        keep: bool = True,
    ) -> None:
        self.folder: Path | None = chats_folder(user)
        self.saved: set[str] = set()
        self.bar = "█"
        self._notify: Notify | None = None
        self._untold: list[Notice] = []
        models.notify = self._emit
        first = talking(models.model(pair, _drafting(load, pair, options.mode), options.thinking))
        service = Service(first, self._find, on_progress=self._emit)
        super().__init__(service, models, load, user)
        recorder = Recorder(self.folder, lambda text: self._emit(Notice(text, "warning")), keep)
        self.conversation = Conversation(service, options, recorder)

    def listen(self, notify: Notify) -> None:
        """Tell ``notify`` from now on what is found and how far a load is, from any thread; also what came before."""
        self._notify = notify
        for notice in self._untold:
            notify(notice)
        self._untold = []

    def warn(self, text: str) -> None:
        """Warn the user of something."""
        self._emit(Notice(text, "warning"))

    def _emit(self, event: Notice | LoadProgress) -> None:
        if self._notify is not None:
            self._notify(event)
        elif isinstance(event, Notice):
            self._untold.append(event)

    # the pair

    def open(self) -> None:
        """Load the pair; takes seconds to minutes.

        Raises:
            UsageError: it has no tokenizer. DFlashError: it cannot be loaded.
        """
        self.service.load()

    def close(self) -> None:
        """Free the model and the chat file."""
        self.conversation.recorder.close()
        self.service.close()

    def change_model(self, pair: Pair) -> None:
        """Load another pair in this one's place, as the chat was begun; this one stays chosen where that fails.

        The old one goes first: two may not fit into memory.
        """
        options = self.conversation.options
        load = _drafting(self._load, pair, options.mode)
        self.service.switch_to(talking(self.models.model(pair, load, options.thinking)))
        self._warn_of_thinking()

    def load(self, choice: LoadChoice) -> str:
        """See ``ModelCatalog``; replies are drafted from then on where the choice has a drafter."""
        text = super().load(choice)
        self.conversation.options.mode = "dflash" if choice.config.draft else "ar"
        self._warn_of_thinking()
        return safe_line(text)

    def _warn_of_thinking(self) -> None:
        notice = thinking_notice(self.pair, self.conversation.options.thinking)
        if notice:
            self.warn(notice)

    def _find(self, name: str, load: LoadConfig | None) -> Model:
        return talking(self.models.find(name, load))

    @property
    def facts(self) -> SessionFacts | None:
        """What is loaded, and how; None while nothing is."""
        return self.service.facts if self.service.status.state in ("ready", "broken") else None

    @property
    def broken(self) -> bool:
        """True when the loaded pair cannot be used any more; the next message loads it again."""
        return self.service.status.state == "broken"

    @property
    def loads_here(self) -> bool:
        """False where another program has the models: nothing is planned or downloaded."""
        return not self.decided

    @property
    def context(self) -> int | None:
        """Tokens of context that the chat was begun with; None for what fits."""
        return self._load.context

    def memory(self) -> Occupancy:
        """Measure how full the device of the loaded pair is; from any thread, may take seconds."""
        from dflash_local.planner.occupancy import Occupancy, occupancy

        facts = self.facts
        if facts is None:
            return Occupancy()
        return occupancy(facts.device, self.user.environ, facts.pid)

    # commands

    def take_up(self, name: str) -> str:
        """Go on with a chat on disk and return what it is, in a line.

        Raises:
            UsageError: there is none of that name. DFlashError: it cannot be read.
        """
        path, found = history.load(self.folder, name)
        self.conversation.take_up(found)
        self.conversation.recorder.go_on(path)
        if found.bad_lines:
            self.warn(f"{found.bad_lines} damaged line(s) of {name} were passed over")
        return safe_line(f"{counted(len(found.turns), 'message')} of a chat with {found.model or 'an unknown model'}")

    @property
    def commands(self) -> Mapping[str, ChatCommand]:
        """The commands of every chat, by name; those without an ``act`` are the screen's own."""
        return COMMANDS

    def execute(self, line: str) -> str:
        """Run one line that begins with a slash and return what it says; may take as long as loading a model.

        Raises:
            UsageError: no such command, or a bad argument. DFlashError: it failed.
        """
        word, _, argument = line.partition(" ")
        command = self.commands.get(word.lower())
        if command is None or command.act is None:
            close = difflib.get_close_matches(word.lower(), [*self.commands, *ALIASES], n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else "/help shows the commands"
            raise UsageError(f"unknown command {word}", f"{hint} A message may begin with // instead of /")
        return command.act(self, argument.strip())

    def resolve(self, model: str, drafter: str | None) -> Pair:
        """Return the pair that /model names."""
        draft = self.conversation.options.mode == "dflash"
        return self.models.pair(model, drafter, replace(self._load, draft=draft))


def talking(model: Model) -> Model:
    """Return the model, whose load refuses a pair that has no tokenizer with UsageError."""

    def load(progress: Callable[[LoadProgress], None]) -> Backend:
        backend = model.load(progress)
        if not backend.facts.has_tokenizer:
            backend.close()
            raise UsageError(f"{model.name} has no tokenizer, so it cannot chat", "dflash run with --prompt-ids works")
        return backend

    return replace(model, load=load)


def _drafting(load: LoadConfig, pair: Pair, mode: Mode) -> LoadConfig:
    """Return a load with the drafter, too, where there is one: /mode switches."""
    return replace(load, draft=pair.drafter is not None or mode == "dflash")
