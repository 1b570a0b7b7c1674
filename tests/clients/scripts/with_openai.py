"""The openai client."""

from __future__ import annotations

import openai
from checks import FIRST, KEY, LEAVE_AFTER, LONG, MODEL, OTHER_MODEL, SECOND, TOOL, assistant, report, url, user

client = openai.OpenAI(base_url=url(), api_key=KEY, max_retries=0, timeout=120)


def ask(*messages: dict[str, str], **more: object) -> str:
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **more).choices[0].message


def stream() -> list[str]:
    chunks = client.chat.completions.create(model=MODEL, messages=[user(FIRST)], temperature=0, stream=True)
    return [piece for chunk in chunks if chunk.choices and (piece := chunk.choices[0].delta.content)]


def turns() -> list[str]:
    first = ask(user(FIRST)).content
    return [first, ask(user(FIRST), assistant(first), user(SECOND)).content]


def stop() -> int:
    read = 0
    with client.chat.completions.create(model=MODEL, messages=[user(LONG)], temperature=0, stream=True) as chunks:
        for chunk in chunks:
            read += bool(chunk.choices and chunk.choices[0].delta.content)
            if read == LEAVE_AFTER:
                break
    return read


def wrong_model() -> str:
    try:
        client.chat.completions.create(model=OTHER_MODEL, messages=[user(FIRST)])
    except openai.NotFoundError as error:
        return str(error)
    return "no error"


report(
    models=lambda: [model.id for model in client.models.list()],
    chat=lambda: ask(user(FIRST)).content,
    stream=stream,
    turns=turns,
    tools=lambda: ask(user(FIRST), tools=[TOOL]).content,
    wrong_model=wrong_model,
    stop=stop,
)
