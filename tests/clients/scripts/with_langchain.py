"""langchain's ChatOpenAI."""

from __future__ import annotations

import openai
from checks import FIRST, KEY, LEAVE_AFTER, LONG, MODEL, OTHER_MODEL, SECOND, add, assistant, report, url, user
from langchain_openai import ChatOpenAI


def model(name: str = MODEL) -> ChatOpenAI:
    return ChatOpenAI(model=name, base_url=url(), api_key=KEY, temperature=0, max_retries=0, timeout=120)


def turns() -> list[str]:
    first = model().invoke([user(FIRST)]).content
    return [first, model().invoke([user(FIRST), assistant(first), user(SECOND)]).content]


def stop() -> int:
    read = 0
    chunks = model().stream([user(LONG)])
    for chunk in chunks:
        read += bool(chunk.content)
        if read == LEAVE_AFTER:
            break
    chunks.close()
    return read


def wrong_model() -> str:
    try:
        model(OTHER_MODEL).invoke([user(FIRST)])
    except openai.NotFoundError as error:
        return str(error)
    return "no error"


report(
    models=lambda: [one.id for one in model().root_client.models.list()],
    chat=lambda: model().invoke([user(FIRST)]).content,
    stream=lambda: [chunk.content for chunk in model().stream([user(FIRST)]) if chunk.content],
    turns=turns,
    tools=lambda: model().bind_tools([add]).invoke([user(FIRST)]).content,
    wrong_model=wrong_model,
    stop=stop,
)
