"""Texts of a request as tokens of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planetary.core.errors import UserError
from planetary.runs.serve.http.requests import Prompt
from planetary.runs.serve.program.served_model import ServedModel
from planetary.web.api_errors import wrong

LONG_TEXT = 1 << 14
"""Bytes or tokens from which on a text is encoded or decoded in a thread. 16 MiB take seconds."""


def prompts_of(prompt: Prompt, param: str) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    texts = [one for one in prompt if not isinstance(one, int)]
    if prompt and not texts:
        return [[one for one in prompt if isinstance(one, int)]]
    if not prompt or len(texts) != len(prompt) or len({type(one) for one in texts}) != 1:
        raise wrong(param, "expected a text, a list of tokens, or a list of either, none of them empty")
    return texts


@dataclass(frozen=True)
class PromptText:
    """A prompt.

    Attributes:
        tokens: one at least.
        text: as the client wrote it, or from tokens.
        added: tokens at the beginning that `text` does not have.
        lost: bytes at the beginning of the token after them that `text` does not have: some tokenizers begin a text
            with a space.
    """

    tokens: list[int]
    text: str
    added: int = 0
    lost: bytes = b""


async def prompt_text(prompt: str | list[int], model: ServedModel, param: str, *, special: bool = True) -> PromptText:
    """Return a prompt of a request. Raises `ApiError`."""
    if isinstance(prompt, str):
        tokens, added = await encoded(model, prompt, special=special), len(model.begins) if special else 0
        begins_with_space = len(tokens) > added and model.tokenizer.token_bytes(tokens[added])[:1] == b" "
        found = PromptText(tokens, prompt, added, b" " if begins_with_space and prompt[:1] != " " else b"")
    else:
        require_known(prompt, model, param)
        found = PromptText(prompt, model.tokenizer.decode(prompt).decode(errors="replace"))
    if not found.tokens:
        raise wrong(param, "expected at least one token")
    require_known(found.tokens, model, param)
    return found


async def encoded(model: ServedModel, text: str, *, special: bool) -> list[int]:
    """Return the tokens of a text; `special`: with those that begin every text of the model. Raises `ApiError`."""
    try:
        data = text.encode()
        found = (await apart(len(data), lambda: model.tokenizer.encode(data))).tolist()
    except (UserError, UnicodeEncodeError) as error:  # a character the tokenizer does not have
        raise wrong("prompt", str(error)) from None
    return [*model.begins, *found] if special else found


async def apart(size: int, work: Callable[[], Any]) -> Any:
    """Return the result of work on a text of `size`: of a long one in a thread, so streams go on meanwhile."""
    return work() if size < LONG_TEXT else await asyncio.to_thread(work)


def require_known(tokens: list[int], model: ServedModel, param: str) -> None:
    strange = next((token for token in tokens if not 0 <= token < model.vocabulary), None)
    if strange is not None:
        raise wrong(param, f"the model knows tokens from 0 to {model.vocabulary - 1}, found {strange}")
