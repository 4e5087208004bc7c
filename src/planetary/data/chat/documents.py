"""Chats as documents of training text: rendered by the tokenizer's template, with the characters that are trained."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from planetary.core.errors import UserError
from planetary.data.chat.messages import TRAINING_DAY, Sample
from planetary.data.chat.records import Chat
from planetary.data.chat.renderer import ChatRenderer
from planetary.data.document import Document
from planetary.data.tokenizer_settings import read_settings, read_template
from planetary.net.loop_thread import LoopThread

_AT_A_TIME = 64  # chats on the way to and from the processes
_STOP_S = 10.0


class ChatDocuments:
    """Renders chats with one template, in processes of their own (`renderer`).

    Attributes:
        digest: identity of template and special tokens; equal digests render equally.
    """

    def __init__(self, template: str, special: Mapping[str, str]) -> None:
        """`special`: names such as `eos_token` that the template sees."""
        self._template, self._special = template, dict(special)
        described = [str(TRAINING_DAY), template, sorted(self._special.items())]
        self.digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def __call__(self, chats: Iterable[tuple[str, Chat]]) -> Iterator[Document]:
        """Yield the documents of chats, each given with its place for error texts.

        Raises:
            UserError: the template refuses a chat, or exceeds a limit of time or size.
            ResourceError: the processes cannot be started.
        """
        loop, renderer, rest = LoopThread("chat templates"), ChatRenderer(), iter(chats)
        count = 1  # chats to render: a preview shows the first only
        try:
            while some := [(where, _encodable(chat)) for where, chat in islice(rest, count)]:
                count = _AT_A_TIME
                for (where, chat), samples in zip(some, loop.call(self._rendered(renderer, some)), strict=True):
                    if isinstance(samples, UserError):
                        raise UserError(f"{where}: the chat template fails: {samples}") from None
                    if isinstance(samples, BaseException):
                        raise samples
                    if chat.is_answer and len(samples) > 1:
                        raise UserError(
                            f"{where}: the chat template changes earlier turns of the assistant when later ones "
                            "follow, so an answer of several turns has no single text to compare: make a pair of each "
                            "turn"
                        )
                    yield from _documents(chat, samples)
        finally:
            loop.call(renderer.close())
            loop.stop(_STOP_S)

    async def _rendered(
        self, renderer: ChatRenderer, chats: Iterable[tuple[str, Chat]]
    ) -> list[tuple[Sample, ...] | BaseException]:
        def names(chat: Chat) -> dict[str, Any]:
            return {**self._special, "messages": chat.messages, "tools": chat.tools}

        found = (renderer.samples(self._template, names(chat), chat.turns) for _, chat in chats)
        return await asyncio.gather(*found, return_exceptions=True)


def _encodable(chat: Chat) -> Chat:
    """Return the chat, with "?" in place of halves of characters, which JSON can write, as in documents."""
    text = json.dumps([chat.messages, chat.tools], ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:
        messages, tools = json.loads(text.encode("utf-8", "replace"))
        return msgspec.structs.replace(chat, messages=messages, tools=tools)
    return chat


def _documents(chat: Chat, samples: Iterable[Sample]) -> Iterator[Document]:
    name = hashlib.sha256(json.dumps([chat.messages, chat.tools], sort_keys=True, default=str).encode()).hexdigest()
    for sample in samples:
        yield Document(name, sample.text.encode(), trained=sample.spans, is_exact=sample.exact)


def chat_documents(tokenizer: str) -> ChatDocuments:
    """Return the rendering of chats by the template of the tokenizer that `data.tokenizer` names.

    Raises:
        UserError: it has no template.
    """
    path = Path(tokenizer)
    template = read_template(path.parent) if path.is_file() else ""
    if not template:
        raise UserError(
            f"the data is chats, and the tokenizer {tokenizer} has no chat template to render them with: put it beside "
            "the tokenizer.json that data.tokenizer names, as chat_template.jinja or under chat_template in "
            "tokenizer_config.json"
        )
    return ChatDocuments(template, dict(read_settings(path.parent).names))
