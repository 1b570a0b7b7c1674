"""A conversation on a plain terminal: shows each reply as it comes, and what came of it."""

from __future__ import annotations

from dataclasses import replace

from dflash_local import settings
from dflash_local.catalog.bundled import Pair
from dflash_local.cli.console import Console
from dflash_local.cli.reply import ReplyPrinter, figures, follow
from dflash_local.cli.session import start_service
from dflash_local.events import Finished
from dflash_local.load_config import LoadConfig
from dflash_local.service.conversation import Answer, Conversation, Load
from dflash_local.settings import Settings


def loader(config: LoadConfig, user: Settings, console: Console) -> Load:
    """The way to load a pair as the options of the command say."""
    return lambda pair, draft: start_service(pair, replace(config, draft=draft), user, console)


class Talk:
    """A conversation and the console it is shown on; within a ``with`` its pair is loaded."""

    def __init__(self, console: Console, conversation: Conversation, user: Settings | None = None) -> None:
        self.console, self.conversation = console, conversation
        self.user = user if user is not None else settings.load()

    def __enter__(self) -> Talk:
        self.conversation.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.conversation.close()

    @property
    def pair(self) -> Pair:
        """The pair that is talked with."""
        return self.conversation.pair

    @property
    def broken(self) -> bool:
        """True when no further reply can come from the loaded pair."""
        return self.conversation.broken

    def answer(self, text: str) -> None:
        """Send a message and show the reply; a failed one leaves the conversation as it was.

        Raises:
            DFlashError: the request failed.
        """
        if not self._show(self.conversation.answer(text)):
            self.console.note("nothing came of it, your message is taken back", "dim")

    def regenerate(self) -> None:
        """Replace the last reply by one with a fresh seed.

        Raises:
            UsageError: there is no reply yet. DFlashError: the request failed; the old one stays.
        """
        answer = self.conversation.regenerate()
        if answer.request.sampling.greedy:
            self.console.note("greedy: the reply will be the same; /set temperature 0.7 changes that", "dim")
        self._show(answer)

    def _show(self, answer: Answer) -> bool:
        """Print a reply to its end; False when Ctrl-C came before any text."""
        with answer:
            printer = ReplyPrinter(self.console)
            try:
                follow(answer, printer)
            finally:
                printer.finish()
        if answer.finished is None or not answer.worth_keeping:
            return False
        if ending := self.conversation.turns[-1].ending:
            self.console.note(f"[{ending}]", "yellow")
        self.console.note(f"[{figures(answer.finished)}, seed {answer.finished.stats.seed}]", "dim")
        return True


def histogram(finished: Finished, bar: str, width: int = 40) -> list[str]:
    """The acceptance lengths of a reply as lines of bars, one for each length up to the block."""
    lengths = finished.stats.acceptance_lengths
    if not lengths:
        return []
    counts = {n: lengths.count(n) for n in range(1, max(*lengths, finished.stats.block_size) + 1)}
    most = max(counts.values())
    return [f"{n:3d} {bar * round(width * count / most)} {count}" for n, count in counts.items()]
