"""The ``llm`` command, with the server in its ``extra-openai-models.yaml``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from checks import FIRST, LONG, MODEL, OTHER_MODEL, SECOND, report, url

LLM = [sys.executable, "-m", "llm"]
FUNCTION = 'def add(a: int, b: int) -> int:\n    "Add two whole numbers."\n    return a + b\n'
# one model by its name, one that the server does not have
MODELS = "".join(
    f"- model_id: {name}\n  model_name: {name}\n  api_base: {url()}\n  supports_tools: true\n"
    for name in (MODEL, OTHER_MODEL)
)


def run(*arguments: str) -> str:
    """The command's output. Its words on stderr when it fails."""
    done = subprocess.run([*LLM, *arguments], capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.rstrip("\n")


def ask(text: str, *more: str) -> str:
    return run("-m", MODEL, "-o", "temperature", "0", *more, text)


def stop() -> int:
    """Ctrl-C at the first characters."""
    process = subprocess.Popen([*LLM, "-m", MODEL, "-o", "temperature", "0", LONG], stdout=subprocess.PIPE)
    read = len(os.read(process.stdout.fileno(), 64))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    return read


def wrong_model() -> str:
    try:
        return f"no error: {run('-m', OTHER_MODEL, FIRST)}"
    except RuntimeError as error:
        return str(error)


Path(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml").write_text(MODELS, encoding="utf-8")
report(
    models=lambda: [MODEL] if f": {MODEL}\n" in run("models") + "\n" else run("models"),
    chat=lambda: ask(FIRST, "--no-stream"),
    stream=lambda: [ask(FIRST)],
    turns=lambda: [ask(FIRST), ask(SECOND, "-c")],
    tools=lambda: ask(FIRST, "--functions", FUNCTION),
    wrong_model=wrong_model,
    stop=stop,
)
