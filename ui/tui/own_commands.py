"""The commands that only a screen has. Each gets the chat screen and the rest of the line."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from textual.app import SuspendNotSupported

from dflash_local import child_process, settings
from dflash_local.app.chat_commands import ALIASES, words
from dflash_local.app.figures_origin import figures_origin
from dflash_local.app.model_entries import ModelEntry
from dflash_local.errors import DFlashError, UsageError
from dflash_local.report.race_file import About, command, load_options
from dflash_local.service.race import Race, Racer
from dflash_local.ui.safety import parser
from dflash_local.ui.tui.chats import ChatsScreen
from dflash_local.ui.tui.dialogs import HelpScreen, ModelsScreen, PullScreen
from dflash_local.ui.tui.load import LoadScreen
from dflash_local.ui.tui.race import RaceScreen

if TYPE_CHECKING:
    from textual.app import App

    from dflash_local.app.chat_session import ChatSession
    from dflash_local.request import Request
    from dflash_local.ui.tui.chat import ChatScreen


ON_A_SERVER = "replies come from a server: /model NAME takes another model that it serves"
COMING = "a reply is coming; Esc stops it"


async def _help(screen: ChatScreen, _argument: str) -> None:
    screen.app.push_screen(HelpScreen(screen.commands))


async def _regenerate(screen: ChatScreen, _argument: str) -> None:
    """Make the last reply again; the old one stays where nothing comes."""
    if screen.busy or not screen.transcript.replies or not screen.conversation.turns:
        screen.notify(COMING if screen.busy else "there is no reply to make again", markup=False)
        return

    async def again() -> None:
        old = screen.transcript.replies[-1]
        old.display = False
        if screen.conversation.sampling.greedy:
            await screen.show("greedy: the reply will be the same; /set temperature 0.7 changes that")
        if await screen.reply(screen.conversation.regenerate):
            await old.remove()
        else:
            old.display = True

    screen.start(again())


async def _continue(screen: ChatScreen, _argument: str) -> None:
    """Let a reply that was cut off go on, in its place."""

    async def on() -> None:
        if await screen.reply(screen.conversation.continue_reply):
            await screen.rebuild()

    if not screen.start(on()):
        screen.notify(COMING, markup=False)


async def _load(screen: ChatScreen, argument: str) -> None:
    """Go on with a chat; without its name they are shown."""

    async def load() -> None:
        name = argument
        if not name:
            entry = await screen.dialog(ChatsScreen(screen.session.folder))
            name = entry.name if entry is not None else ""
        if name:
            await screen.run_command(lambda: screen.session.execute(f"/load {name}"))

    if not screen.start(load()):
        screen.composer.put(f"/load {argument}".strip())


async def _edit(screen: ChatScreen, _argument: str) -> None:
    """Put the last message back into the field, and take its reply out of the conversation."""
    if screen.busy:
        screen.notify(COMING, markup=False)
        return
    try:
        text = screen.conversation.take_back()
    except DFlashError as error:
        await screen.show_error(error)
        return
    await screen.rebuild()
    screen.composer.put(text)


async def _copy(screen: ChatScreen, argument: str) -> None:
    """Copy the last reply, or its code block of that number, to the clipboard."""
    replies = [turn.content for turn in screen.conversation.turns if turn.role == "assistant"]
    if not replies:
        screen.notify("there is no reply to copy", markup=False)
        return
    text = replies[-1]
    if argument:
        fences = [token.content.removesuffix("\n") for token in parser().parse(text) if token.type == "fence"]
        if not (argument.isdecimal() and 0 < int(argument) <= len(fences)):
            screen.notify(f"the last reply has {len(fences)} code blocks", severity="warning", markup=False)
            return
        text = fences[int(argument) - 1]
    screen.app.copy_to_clipboard(text)
    screen.notify(f"{len(text):,} characters copied", markup=False)


async def _editor(screen: ChatScreen, _argument: str) -> None:
    text = edited(screen.app, screen.composer.message)
    if text is None:
        screen.notify("set VISUAL or EDITOR to write messages there", severity="warning", markup=False)
    else:
        screen.composer.put(text)


async def _race(screen: ChatScreen, argument: str) -> None:
    """Race the typed message, or the last one, with and without drafting."""
    if screen.busy:
        screen.notify(COMING, markup=False)
        return
    text = argument or screen.composer.message.strip()

    async def race() -> None:
        request = screen.conversation.request(text)
        racer = Racer(screen.session.service, request)
        prompt = next(message.content for message in reversed(request.messages) if message.role == "user")
        about = partial(_about, screen.session, request, prompt)
        found = await screen.dialog(RaceScreen(screen.session.pair.label, prompt, lambda _notify: racer, about))
        if found is not None:
            screen.readings.compare(found.ar.finished.stats)
            decode = "" if found.speed_up is None else f", {found.speed_up:.2f}x decode"
            await screen.show(f"race: {found.wall_clock:.2f}x wall clock{decode}; {found.verdict}")

    screen.start(race())


def _about(session: ChatSession, request: Request, prompt: str, found: Race) -> About:
    """What a saved race says besides; one within a conversation cannot be repeated by a command."""
    options = load_options(session.pair, session.service.facts, bool(session.decided))
    line = command(session.pair.name, prompt, request, found.seed, options)
    if len(request.messages) > 1:
        line = f"/race, after {len(request.messages) - 1} messages of a chat"
    origin = figures_origin(session.service, session.pair, session.user, bool(session.models.label))
    return About(session.pair.label, prompt, line, origin)


async def _models(screen: ChatScreen, name: str) -> None:
    if not screen.session.loads_here:
        await screen.show(ON_A_SERVER)
        return
    screen.start(choose_pair(screen, name))


async def choose_pair(screen: ChatScreen, name: str) -> None:
    """Show the registry, that pair first, until one is loaded or the list is left."""
    while True:
        entries = await screen.do(screen.session.entries)
        entry = await screen.dialog(ModelsScreen(entries, screen.session.user, name))
        if entry is None or await load_dialog(screen, entry.name, f"/model {entry.name}", listed=entry):
            return
        name = entry.name


async def load_dialog(screen: ChatScreen, name: str, line: str, listed: ModelEntry | None = None) -> bool:
    """Show the ways to load a pair; ``line`` loads it where there is nothing to choose. False when that was left.

    Args:
        listed: it was chosen of the registry's pairs: its download is offered where nothing is known of it before.
    """
    session, draft = screen.session, screen.conversation.options.mode == "dflash"
    screen.readings.state = "planning"
    try:
        found = await screen.do(lambda: session.load_choices(name, session.context, draft))
    finally:
        screen.set_ready()
    if found is None and listed is not None and not listed.here:
        return await _offer_download(screen, listed.name, listed=True)
    if found is None or found.settled or (draft and not found.has_drafter):
        await screen.run_command(lambda: session.execute(line))
        return True
    choice = await screen.dialog(LoadScreen(session, found))
    if choice is not None:
        await screen.run_command(lambda: session.load(choice))
    return choice is not None


async def _pull(screen: ChatScreen, argument: str) -> None:
    """Download one pair; asked about first only where it will not run here."""
    if not screen.session.loads_here:
        await screen.show(ON_A_SERVER)
    elif not argument:
        await screen.show("/pull needs the name of a pair\n/models lists them", "error")
    else:
        screen.start(_offer_download(screen, argument))


async def _offer_download(screen: ChatScreen, name: str, listed: bool = False) -> bool:
    """Download a pair where the user wants it; False when it was left."""
    session = screen.session
    entry, before = await screen.do(lambda: (session.entry(name), session.before_download(name)))
    if entry.here:
        await screen.show(f"{entry.name} is here: /model {entry.name} talks to it")
        return True
    question = PullScreen(session, entry.name, entry.question, before, ask=listed or not entry.fine)
    pulled = await screen.dialog(question)
    if pulled is not None and pulled.start_chat:
        await load_dialog(screen, entry.name, f"/model {entry.name}")
        return True
    if pulled is not None and pulled.word:
        await screen.show(pulled.word + (f": /model {entry.name} talks to it" if pulled.here else ""))
    return False


async def _theme(screen: ChatScreen, argument: str) -> None:
    if argument in screen.app.available_themes:
        screen.app.theme = argument
    else:
        await screen.show(f"themes: {', '.join(sorted(screen.app.available_themes))}")


async def _quit(screen: ChatScreen, _argument: str) -> None:
    await screen.app.action_quit()


def edited(app: App[object], text: str) -> str | None:
    """Return what the editor left of ``text``; None when there is no editor, or none can be shown here."""
    environ = settings.load().environ
    command = shlex.split(environ.get("VISUAL") or environ.get("EDITOR") or "")
    if not command:
        return None
    with tempfile.TemporaryDirectory(prefix="dflash-") as folder:
        file = Path(folder) / "message.md"
        file.write_text(text, encoding="utf-8")
        try:
            with app.suspend():
                # it opens other files by names below the user's folder
                done = child_process.run([*command, str(file)], child_process.USERS_FOLDER)
        except (OSError, SuspendNotSupported):
            return None
        return file.read_text(encoding="utf-8", errors="replace").rstrip("\n") if done.returncode == 0 else text


Act = Callable[["ChatScreen", str], Awaitable[None]]
OWN: dict[str, tuple[str, Act]] = {
    "/help": ("keys and commands", _help),
    "/regen": ("the last reply again, with a fresh seed", _regenerate),
    "/continue": ("let a reply that was cut off go on", _continue),
    "/load [CHAT]": ("go on with another chat", _load),
    "/edit": ("the last message back into the field", _edit),
    "/copy [N]": ("the last reply, or its Nth code block, to the clipboard", _copy),
    "/editor": ("write the message in $VISUAL or $EDITOR", _editor),
    "/race [MESSAGE]": ("the message with and without drafting, side by side", _race),
    "/models": ("choose another pair from the registry", _models),
    "/pull NAME": ("download a pair of the registry", _pull),
    "/theme [NAME]": ("show or change the theme", _theme),
    "/quit": ("leave (/bye, /exit)", _quit),
}


def own_command(word: str) -> Act | None:
    """Find the screen's own command of that name."""
    name = ALIASES.get(word.lower(), word.lower())
    return next((act for usage, (_, act) in OWN.items() if usage.split()[0] == name), None)


def named_model(word: str, argument: str) -> str:
    """Name the one model that a command is to load; empty for every other command."""
    try:
        named = words(argument) if word.lower() == "/model" else []
    except UsageError:  # the command itself refuses it
        return ""
    return named[0] if len(named) == 1 else ""
