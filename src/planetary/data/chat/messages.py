"""Messages between a renderer of chats and its process: the renderer's side needs no Jinja."""

from __future__ import annotations

from datetime import date
from typing import Any

import msgspec

MOST_TEXT = 16 << 20
"""Characters of a rendered chat."""
TRAINING_DAY = date(2024, 7, 26)
"""Today, to a template that renders training data: the day that Llama 3's template takes where it knows none."""


class Sample(msgspec.Struct, frozen=True):
    """A chat, or the beginning of one, as a text to train on.

    Attributes:
        text: rendered by the template.
        spans: of the characters that the assistant said, ascending.
        exact: the template marks them; else a span may end with white space behind the end-of-turn token.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    exact: bool


class ChatToRender(msgspec.Struct, frozen=True):
    """A template, and the names it sees."""

    template: str
    names: dict[str, Any]
    seconds: float  # the kernel ends the process after so long, should the gateway not do so before
    turns: tuple[int, ...] | None = None  # assistant's messages to train; None: a prompt is wanted
    is_training: bool = False  # prompt of a training, in which today is `TRAINING_DAY`


class Rendered(msgspec.Struct, frozen=True):
    """The text of a chat, or those that train it, or the reason why there is none."""

    text: str = ""
    samples: tuple[Sample, ...] = ()
    problem: str = ""
