"""The text of a chat, as the model was trained on it: the Jinja template of its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planetary.core.errors import UserError


class ChatTemplate:
    """A template, compiled once. It runs in Jinja's sandbox: it comes with a model from anywhere."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` by the names that templates have for them, such as `eos_token`.

        Raises:
            UserError: it is no template.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self._special = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError(f"the chat template cannot be read: {error}") from error

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt of a chat, up to where the assistant's answer begins. Raises `UserError`."""
        from jinja2 import TemplateError

        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._special)
        except (TemplateError, TypeError, ValueError, KeyError, ZeroDivisionError) as error:
            raise UserError(f"the chat template refuses these messages: {error}") from error


def _refuse(message: str) -> None:
    raise UserError(message)
