"""The server programs that are known here, one file each: how each is recognised, and how a request is put to it."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_local.remote.programs import (
    dflash,
    llama_cpp,
    lm_studio,
    mistral_rs,
    mlx_lm,
    ollama,
    sglang,
    tabby_api,
    vllm,
)
from dflash_local.remote.programs.server_program import Launching, Program, ServerProgram

# In the order in which an unknown server is asked: those with an answer of their own first.
PROGRAMS: Mapping[Program, ServerProgram] = {
    module.PROGRAM.name: module.PROGRAM
    for module in (sglang, vllm, llama_cpp, dflash, lm_studio, ollama, tabby_api, mistral_rs, mlx_lm)
}


def launching_of(program: Program) -> Launching:
    """How one of the programs that are launched is started."""
    found = PROGRAMS[program].launching
    assert found is not None, program
    return found
