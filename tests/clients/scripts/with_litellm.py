"""litellm, told of an OpenAI-compatible address."""

from __future__ import annotations

import litellm
from checks import FIRST, KEY, LEAVE_AFTER, LONG, MODEL, OTHER_MODEL, SECOND, TOOL, assistant, report, url, user

litellm.telemetry = False


def ask(*messages: dict[str, str], model: str = MODEL, **more: object) -> object:
    return litellm.completion(
        model=f"openai/{model}",
        messages=list(messages),
        api_base=url(),
        api_key=KEY,
        temperature=0,
        timeout=120,
        **more,
    )


def said(*messages: dict[str, str], **more: object) -> str:
    return ask(*messages, **more).choices[0].message.content


def stream() -> list[str]:
    return [piece for chunk in ask(user(FIRST), stream=True) if (piece := chunk.choices[0].delta.content)]


def turns() -> list[str]:
    first = said(user(FIRST))
    return [first, said(user(FIRST), assistant(first), user(SECOND))]


def stop() -> int:
    read = 0
    chunks = ask(user(LONG), stream=True)
    for chunk in chunks:
        read += bool(chunk.choices[0].delta.content)
        if read == LEAVE_AFTER:
            break
    chunks.completion_stream.close()
    return read


def wrong_model() -> str:
    try:
        said(user(FIRST), model=OTHER_MODEL)
    except litellm.NotFoundError as error:
        return str(error)
    return "no error"


report(
    models=lambda: litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=url(), api_key=KEY
    ),
    chat=lambda: said(user(FIRST)),
    stream=stream,
    turns=turns,
    tools=lambda: said(user(FIRST), tools=[TOOL]),
    wrong_model=wrong_model,
    stop=stop,
)
