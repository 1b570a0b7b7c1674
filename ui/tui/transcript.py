"""The conversation on screen: messages, replies and notes in order; its end is followed until the user scrolls away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Click
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Collapsible, Static

from dflash_local.events import Origin, Piece, Step
from dflash_local.service.pieces import SafePieces, marked, text_of
from dflash_local.store.records import Turn
from dflash_local.terminal import safe, safe_line
from dflash_local.ui.tui.composer import Composer
from dflash_local.ui.tui.lines import PlainLayout
from dflash_local.ui.tui.markdown import MarkdownLayout
from dflash_local.ui.tui.text_view import TextView, ground

MAX_LINES = 20  # of one message on screen, or so many characters: what was pasted is not read here
MAX_CHARS = 2_000
MAX_SHOWN = 120  # messages on screen; earlier ones stay in the conversation and its file
MAX_REBUILT = 40  # laying a reply out takes a while
EARLIER = "earlier messages are not on screen any more; /export writes all of them"
WAITS = "waits for what runs to end; Esc takes it back"
STYLES: dict[Origin, str] = {"accepted": "", "bonus": "underline $text-accent"}  # as in a race


class UserMessage(Static):
    """Shows the beginning of a message as it was sent, and a remark on it."""

    def __init__(self, text: str, remark: str = "") -> None:
        lines = safe(text).split("\n")
        shown, more = "\n".join(lines[:MAX_LINES]), len(lines) - MAX_LINES
        if len(shown) > MAX_CHARS:
            shown = f"{shown[:MAX_CHARS]}\n[{len(safe(text)) - MAX_CHARS:,} more characters were sent]"
        elif more > 0:
            shown += f"\n[{more:,} more line{'s' if more > 1 else ''} were sent]"
        super().__init__(Content(f"{shown}\n[{remark}]" if remark else shown), classes="user")


class Note(Static):
    """Shows what the program says; a warning or an error begins with its word."""

    def __init__(self, text: str, level: str = "note") -> None:
        lead = "" if level == "note" else f"{level}: "
        super().__init__(Content(lead + safe(text).strip("\n")), classes=level)


class UnsentFold(Static, can_focus=True):
    """Stands for the messages that are not sent any more; opened, they are shown below it, paler than the others."""

    BINDINGS = [Binding("enter,space", "turn", "Open or close", show=False)]

    def __init__(self, count: int, summarised: bool) -> None:
        how = "sent as a summary" if summarised else "not sent"
        self._text = f"{count} earlier messages are {how}, the chat keeps them"
        super().__init__(classes="fold", markup=False)

    def on_mount(self) -> None:
        self._name_it(False)

    def on_click(self) -> None:
        self.action_turn()

    def action_turn(self) -> None:
        """Show what it stands for, or hide it again."""
        if isinstance(self.parent, Transcript):
            self._name_it(self.parent.toggle_class("-unfolded").has_class("-unfolded"))

    def _name_it(self, opened: bool) -> None:
        self.update(Content(f"{'▼' if opened else '▶'} {self._text}"))


class Examples(Vertical):
    """Shows prompts to begin with; as long as they are shown, the field offers them to Tab, and a click puts one in."""

    def __init__(self, prompts: Sequence[str]) -> None:
        super().__init__(classes="examples")
        self._prompts = {f"example-{number}": prompt for number, prompt in enumerate(prompts)}

    def compose(self) -> ComposeResult:
        yield Static("Try one of these: Tab or a click puts it into the field.", markup=False)
        for name, prompt in self._prompts.items():
            yield Static(Content(f"› {safe_line(prompt)}"), id=name, classes="example")

    def on_mount(self) -> None:
        self.screen.query_one(Composer).examples = list(self._prompts.values())

    def on_unmount(self) -> None:
        for composer in self.screen.query(Composer):  # none where the program ends
            composer.examples = ()

    def on_click(self, event: Click) -> None:
        prompt = self._prompts.get((event.widget and event.widget.id) or "")
        if prompt is not None:
            composer = self.screen.query_one(Composer)
            composer.put(prompt)
            composer.focus()


class ReplyView(Vertical):
    """Shows the steps of a reply as they come: its thinking folded away, its text as Markdown, its figures below.

    Args:
        by_origin: show where each token came from instead of laying the text out; None where that is not known.
    """

    DEFAULT_CSS = """
    ReplyView { height: auto; }
    """

    def __init__(self, by_origin: bool | None = False) -> None:
        super().__init__(classes="reply")
        self._safe = SafePieces()
        self._pieces: list[Piece] = []
        self._by_origin = by_origin
        self._body: TextView | None = None
        self._thoughts: tuple[Collapsible, TextView] | None = None
        self.draws = 0

    def render_lines(self, crop: Region) -> list[Strip]:
        return ground(self, crop)

    @property
    def text(self) -> str:
        """The answer as it is shown."""
        return text_of(self._pieces)

    async def feed(self, steps: Iterable[Step]) -> None:
        """Draw several steps at once."""
        self.draws += 1
        await self._show(self._safe.feed(*steps))

    async def finish(self, figures: str = "", ending: str = "") -> None:
        """Draw what was held back, how it ended when not by itself, and the figures."""
        await self._show(self._safe.finish())
        if ending:
            await self.mount(Static(f"■ {ending}", classes="stopped", markup=False))
        if figures:
            await self.mount(Static(Content(figures), classes="figures"))

    async def show_origins(self, wanted: bool) -> None:
        """Draw the text anew, by origin or laid out."""
        if self._by_origin is None:
            return
        self._by_origin = wanted
        if self._body is not None:
            old, self._body = self._body, None
            await old.remove()
            await self._write(self._pieces)

    async def _show(self, pieces: list[Piece]) -> None:
        thoughts = text_of(piece for piece in pieces if piece.channel == "thinking")
        if thoughts:
            if self._thoughts is None:
                inside = TextView(PlainLayout())
                fold = Collapsible(Vertical(inside, classes="thoughts"), title="thinking", collapsed=True)
                self._thoughts = (fold, inside)
                await self.mount(fold, before=0 if self.children else None)
            fold, inside = self._thoughts
            await inside.write(thoughts)
            fold.title = self._safe.thinking_title
        rest = [piece for piece in pieces if piece.channel != "thinking"]
        if rest:
            self._pieces += rest
            await self._write(rest)

    async def _write(self, pieces: list[Piece]) -> None:
        if self._body is None:
            self._body = TextView(PlainLayout() if self._by_origin else MarkdownLayout(), classes="body")
            place = 1 if self._thoughts is not None else 0
            await self.mount(self._body, before=place if len(self.children) > place else None)
        if not self._by_origin:
            await self._body.write(text_of(pieces))
            return
        for piece in pieces:
            await self._body.write(marked(piece), STYLES[piece.origin])


class Transcript(VerticalScroll):
    """Shows messages, replies and notes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._held: tuple[str, UserMessage] | None = None

    def on_mount(self) -> None:
        self.anchor()

    def render_lines(self, crop: Region) -> list[Strip]:
        return ground(self, crop)

    @property
    def replies(self) -> list[ReplyView]:
        return list(self.query(ReplyView))

    def page(self, direction: int) -> None:
        """Scroll by a screen, up or down; at its end the conversation is followed again."""
        scroll = self.scroll_page_up if direction < 0 else self.scroll_page_down
        scroll(animate=False)

    async def offer(self, prompts: Sequence[str]) -> None:
        """Show prompts to begin with in place of those shown before; none takes them away."""
        if shown := self.query(Examples):
            await shown.remove()
        if prompts:
            await self.mount(Examples(prompts))

    async def add(self, widget: Widget, before: Widget | None = None) -> None:
        """Show one more; the oldest of too many go."""
        await self.mount(widget, before=before)
        if len(self.children) > MAX_SHOWN:
            keep = MAX_SHOWN * 3 // 4
            await self.remove_children(self.children[: len(self.children) - keep])
            await self.mount(Note(EARLIER), before=0)

    async def hold(self, text: str) -> bool:
        """Keep one line that cannot be sent yet, and show that it waits; False when one waits already."""
        if self._held is not None:
            return False
        self._held = text, UserMessage(text, WAITS)
        await self.add(self._held[1])
        return True

    def let_go(self) -> str:
        """Return what waited, which does so no more; empty when nothing did."""
        held, self._held = self._held, None
        if held is None:
            return ""
        held[1].remove()
        return held[0]

    async def fold(self, sent: int, unsent: int, summarised: bool) -> None:
        """Put all before the last ``sent`` messages and replies behind one line: ``unsent`` are not sent any more."""
        await self.query(UnsentFold).remove()
        self.remove_class("-unfolded")
        waits = None if self._held is None else self._held[1]
        said = [one for one in self.children if isinstance(one, (UserMessage, ReplyView)) and one is not waits]
        first = said[-sent] if 0 < sent <= len(said) else None
        before = unsent > 0
        for one in self.children:
            before = before and one is not first
            one.set_class(before, "-unsent")
        if unsent:
            await self.mount(UnsentFold(unsent, summarised), before=0)

    async def rebuild(self, turns: Sequence[Turn]) -> None:
        """Show a conversation from its turns; where its tokens came from is not known any more."""
        await self.remove_children()
        if len(turns) > MAX_REBUILT:
            await self.add(Note(EARLIER))
        for turn in turns[-MAX_REBUILT:]:
            if turn.role == "user":
                await self.add(UserMessage(turn.content))
                continue
            view = ReplyView(None)
            await self.add(view)
            thoughts = (Piece(turn.thinking, "thinking"),) if turn.thinking else ()
            await view.feed([Step((*thoughts, Piece(turn.content)), (), 0, 0, 0, 0.0)])
            await view.finish(ending=turn.ending)
        self.scroll_end(animate=False)
