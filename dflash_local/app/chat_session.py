"""A chat on a terminal, by line or on a screen: the conversation, the pair that is loaded for it, its commands."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local.app import download, model_entries
from dflash_local.app.chat_commands import ALIASES, COMMANDS, Command
from dflash_local.app.examples import examples
from dflash_local.app.fitting import Loaded
from dflash_local.app.load_choices import LoadChoice, LoadChoices, load_choices
from dflash_local.app.loading import Start, start_service
from dflash_local.app.model_entries import ModelEntry
from dflash_local.app.notices import Notify
from dflash_local.app.recommending import suited
from dflash_local.app.resolve import Obtain, choose, resolve
from dflash_local.app.thinking import thinking_notice
from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.generation_config import sampling_defaults
from dflash_local.checkpoint_files.source import open_source
from dflash_local.errors import DFlashError, UsageError
from dflash_local.events import LoadProgress, Notice
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.request import Request, SamplingParams
from dflash_local.service.chat_options import ChatOptions
from dflash_local.service.conversation import Conversation
from dflash_local.service.service import Service, Ticket
from dflash_local.settings import Settings
from dflash_local.store.history import Recorder
from dflash_local.store.paths import chats_folder
from dflash_local.terminal import safe_line

if TYPE_CHECKING:
    from dflash_local.planner.occupancy import Occupancy


class ChatSession:
    """What ``open`` loads, ``close`` gives back.

    Args:
        load: how pairs are loaded. keep: record the chat on disk. start: loads a pair.

    Attributes:
        folder: where chats are kept. saved: names that this chat was saved under.
        bar: a character to draw histograms with. obtain: downloads what a pair that /model names lacks.
    """

    loads_here = True  # else another program has the models: nothing is planned or downloaded

    def __init__(
        self,
        pair: Pair,
        load: LoadConfig,
        options: ChatOptions,
        user: Settings,
        keep: bool = True,
        start: Start = start_service,
    ) -> None:
        self.pair, self.user = pair, user
        self.folder: Path | None = chats_folder(user)
        self.saved: set[str] = set()
        self.bar = "█"
        self.obtain: Obtain = lambda _missing: False
        recorder = Recorder(self.folder, lambda text: self._emit(Notice(text, "warning")), keep)
        self.conversation = Conversation(self, options, recorder)
        self._load, self._start = load, start
        self._loaded_with: LoadConfig | None = None
        self._sampling = SamplingParams()
        self._service: Service | None = None
        self._notify: Notify | None = None
        self._untold: list[Notice] = []

    def listen(self, notify: Notify) -> None:
        """Tell ``notify`` from now on what is found and how far a load is, from any thread; also what came before."""
        self._notify = notify
        for notice in self._untold:
            notify(notice)
        self._untold = []

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
        self._open(self.pair)

    def close(self) -> None:
        """Give the model and the chat file back."""
        self.conversation.recorder.close()
        self._unload()

    def change_model(self, pair: Pair, load: LoadConfig | None = None) -> None:
        """Load another pair in this one's place; this one comes back when that fails.

        The old one goes first: two may not fit into memory.

        Args:
            load: how; as the chat was begun if not given.
        """
        before, loaded_with = self.pair, self._loaded_with
        self._unload()
        try:
            self._open(pair, load)
        except DFlashError:
            if self._service is None:
                self._open(before, loaded_with)
            raise
        if load is not None:
            self.conversation.options.mode = "dflash" if load.draft else "ar"
        notice = thinking_notice(pair, self.conversation.options.thinking)
        if notice:
            self.warn(notice)

    def _open(self, pair: Pair, load: LoadConfig | None = None) -> None:
        defaults = sampling_defaults(open_source(pair.target), pair.sampling)
        if load is None:  # the drafter, too, where there is one: /mode switches
            draft = pair.drafter is not None or self.conversation.options.mode == "dflash"
            load = replace(self._load, draft=draft)
        service = self._start(pair, load, self.user, self._emit)
        if not service.facts.has_tokenizer:
            service.close()
            raise UsageError(f"{pair.name} has no tokenizer, so it cannot chat", "dflash run with --prompt-ids works")
        self._service, self.pair, self._sampling, self._loaded_with = service, pair, defaults, load

    def _unload(self) -> None:
        if self._service is not None:
            self._service.close()
            self._service = None

    @property
    def service(self) -> Service:
        """The loaded pair's service."""
        if self._service is None:
            raise UsageError("no model is loaded", "/model NAME loads one")
        return self._service

    @property
    def facts(self) -> SessionFacts | None:
        """What was loaded, and how; None while nothing is."""
        service = self._service  # another thread may close it meanwhile
        return service.facts if service is not None else None

    @property
    def broken(self) -> bool:
        """True when no further reply can come from the loaded pair."""
        return self._service is not None and self._service.broken

    def memory(self) -> Occupancy:
        """How full the device of the loaded pair is; from any thread, may take seconds."""
        from dflash_local.planner.occupancy import Occupancy, occupancy

        facts = self.facts
        if facts is None:
            return Occupancy()
        return occupancy(facts.device, self.user.environ, facts.pid)

    # what the conversation asks

    @property
    def name(self) -> str:
        """Of the pair."""
        return self.pair.name

    @property
    def sampling(self) -> SamplingParams:
        """The model's own."""
        return self._sampling

    def submit(self, request: Request) -> Ticket:
        """Ask the loaded pair.

        Raises:
            UsageError: none is loaded. DFlashError: see ``Service.submit``.
        """
        return self.service.submit(request)

    # commands

    @property
    def commands(self) -> Mapping[str, Command]:
        """The commands of every chat, by name; those without an ``act`` are the screen's own."""
        return COMMANDS

    @property
    def examples(self) -> Sequence[str]:
        """Prompts that the pair can do, to begin with."""
        return examples(self.pair)

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

    def warn(self, text: str) -> None:
        """Warn the user of something."""
        self._emit(Notice(text, "warning"))

    def resolve(self, model: str, drafter: str | None, load: LoadConfig | None = None) -> Pair:
        """The pair that /model or a load dialog names; see ``app.resolve.resolve``."""
        draft = self.conversation.options.mode == "dflash" if load is None else load.draft
        suit = suited(load or self._load, self.user, self._emit)
        return resolve(model, drafter, self.user, self._emit, draft=draft, obtain=self.obtain, suit=suit)

    # the pairs of this machine

    @property
    def context(self) -> int | None:
        """Tokens of context that the chat was begun with; None for what fits."""
        return self._load.context

    @property
    def _loaded(self) -> Loaded | None:
        facts = self.facts
        return Loaded(self.pair, facts) if facts is not None else None

    def entries(self) -> Sequence[ModelEntry]:
        """The pairs of the registry; see ``app.model_entries``."""
        return model_entries.model_entries(self.user, self._loaded)

    def entry(self, name: str) -> ModelEntry:
        """The pair that a name means; see ``app.model_entries``."""
        return model_entries.model_entry(name, self.user, self._loaded)

    def load_choices(self, name: str, context: int | None = None, draft: bool = True) -> LoadChoices | None:
        """The ways to load a pair in this one's place; see ``app.load_choices``."""
        asked = replace(self._load, quantize=None, context=context, draft=draft)
        return load_choices(name, self.user, asked, self._loaded)

    def load(self, choice: LoadChoice) -> str:
        """Load a pair that is here in one of its ways, in this one's place; says what was loaded.

        Raises:
            DFlashError: it cannot be loaded; the pair before is back then.
        """
        pair = self.resolve(choice.model, None, choice.config)
        self.change_model(pair, choice.config)
        return safe_line(f"now talking to {pair.label}: {self.service.facts.loaded_as}")

    def before_download(self, name: str) -> download.BeforeDownload:
        """Licence of what a name means, and the room for its download."""
        return download.before_download(choose(name, None, self.user), self.user)

    def pull(self, name: str, on_event: download.OnPull, cancelled: Callable[[], bool], draft: bool = True) -> None:
        """Download and verify a pair; see ``app.download``."""
        download.pull(name, self.user, on_event, cancelled, draft)
