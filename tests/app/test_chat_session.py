"""A chat's own pair: loaded, changed, given back; what is told before anybody listens."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.app.chat_session import ChatSession
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import CheckpointError, DFlashError, UsageError
from dflash_local.events import LoadProgress, Notice
from dflash_local.load_config import LoadConfig
from dflash_local.service.chat_options import ChatOptions
from tests.service.scripted import ScriptedFacts, ScriptedModels, ScriptedSession


def pair_of(name: str, folder: Path = Path("nowhere"), drafter: bool = True) -> Pair:
    return Pair(name, folder, folder if drafter else None, bundled=False)


class Chat(ChatSession):
    """Over scripted sessions."""

    def __init__(self, options: ChatOptions | None = None) -> None:
        self.loads: list[tuple[str, bool]] = []
        models = ScriptedModels(self.scripted)
        super().__init__(models, pair_of("one"), LoadConfig(), options or ChatOptions(), settings.load({}), keep=False)

    def scripted(self, pair: Pair, load: LoadConfig) -> ScriptedSession:
        self.loads.append((pair.name, load.draft))
        if pair.name == "bad":
            raise CheckpointError("no such file")
        return ScriptedSession(ScriptedFacts(has_tokenizer=pair.name != "mute"))

    def ask(self, text: str) -> str:
        with self.conversation.answer(text) as answer:
            list(answer)
        return answer.text


def test_a_model_that_cannot_be_had_leaves_the_old_one() -> None:
    with closing(Chat()) as chat:
        chat.open()
        for name in ("bad", "mute"):
            with pytest.raises(DFlashError):
                chat.change_model(pair_of(name))
            assert chat.pair.name == "one" and chat.ask("hi")
        chat.conversation.options.mode = "ar"
        chat.change_model(pair_of("alone", drafter=False))
        assert chat.loads[-1] == ("alone", False) and chat.pair.name == "alone"


def test_what_is_said_before_anybody_listens_is_not_lost() -> None:
    chat, heard = Chat(), list[Notice | LoadProgress]()
    chat.warn("early")
    chat._emit(LoadProgress("loading", 0.5))
    chat.listen(heard.append)
    chat._emit(LoadProgress("loading", 0.9))
    assert heard == [Notice("early", "warning"), LoadProgress("loading", 0.9)]


def test_an_unknown_command_has_its_nearest_also_among_those_of_the_screens() -> None:
    chat = Chat()
    for line, near in (("/mdel x", "/model"), ("/hlp", "/help"), ("/regen", "/regen"), ("/qiut", "/quit")):
        with pytest.raises(UsageError, match="unknown command") as raised:
            chat.execute(line)
        assert f"did you mean {near}?" in raised.value.hint
