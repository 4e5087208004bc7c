"""Texts that are JSON: a grammar decides which tokens may follow (Willard and Louf 2023, arXiv:2307.09702).

The grammars are llguidance's. It is optional: the extra `grammar`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from planetary.core.errors import UserError
from planetary.data.tokenizer import JsonTokenizer, Tokenizer
from planetary.runs.serve.program.served_model import ServedModel
from planetary.web.api_errors import ApiError, wrong

PARAM = "response_format"
_COMPACT: Any = {"whitespace_flexible": False}  # else a model that likes white space never ends
_SPACED: Any = {**_COMPACT, "key_separator": ": ", "item_separator": ", "}  # as the calls that models learnt from
_NO_END = "\ufffeend of text"  # stands for the token that ends a text where the model has none


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """OpenAI's `response_format.json_schema`."""

    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """The form of a text: any (`text`), an object (`json_object`), or a schema's (`json_schema`)."""

    type: str
    json_schema: JsonSchemaFormat | None = None

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """The JSON schema of the text; None: it may be anything. Raises `ApiError`."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return {"type": "object"}
            case "json_schema" if self.json_schema is not None:
                return self.json_schema.schema
            case "json_schema":
                raise wrong(PARAM, "the type json_schema needs json_schema.schema")
        raise wrong(PARAM, f'expected the type text, json_object or json_schema, found "{self.type}"')


class JsonConstraint:
    """The grammar of one text; a text that goes on elsewhere is followed on."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        """`matcher`: llguidance's, at the beginning."""
        self._matcher, self._vocabulary = matcher, vocabulary
        self._taken = 0

    def allowed(self, generated: Sequence[int]) -> np.ndarray:
        self._follow(generated)
        found = np.zeros(self._vocabulary, bool)
        if not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            flags = np.unpackbits(bits, bitorder="little")[: self._vocabulary]
            found[: len(flags)] = flags
        return found

    def is_complete(self, generated: Sequence[int]) -> bool:
        self._follow(generated)
        return bool(self._matcher.is_stopped())

    def _follow(self, generated: Sequence[int]) -> None:
        for token in generated[self._taken :]:
            self._matcher.consume_token(token)
        self._taken = len(generated)


class Grammars:
    """Makes constraints for one model."""

    def __init__(self, model: ServedModel) -> None:
        """Nothing is loaded before it is needed."""
        self._model = model
        self._tokenizer: Any = None

    def constraints(
        self, schema: Mapping[str, Any] | None, param: str = PARAM, *, is_spaced: bool = False
    ) -> Callable[[], JsonConstraint] | None:
        """Return the maker of a constraint for each text of a request; None: there is none. Takes a moment.

        Args:
            schema: of the texts; None: they may be anything.
            param: field of the request that has it.
            is_spaced: whether a space follows each comma and colon.

        Raises:
            ApiError: the schema cannot be followed, or llguidance is not installed.
        """
        if schema is None:
            return None
        if importlib.util.find_spec("llguidance") is None:
            raise ApiError(
                501,
                "texts of a JSON schema need a grammar library where the gateway runs: "
                "pip install 'planetary-compute[grammar]'",
                param=param,
                code="not_installed",
            )
        from llguidance import LLMatcher  # pyright: ignore[reportMissingImports] - optional

        if self._tokenizer is None:
            self._tokenizer = _adapted(self._model)
        try:
            defaults = _SPACED if is_spaced else _COMPACT
            grammar = LLMatcher.grammar_from_json_schema(msgspec.json.encode(schema).decode(), defaults=defaults)
            first = LLMatcher(self._tokenizer, grammar)
        except ValueError as error:
            raise wrong(param, str(error).splitlines()[0]) from None
        if first.is_error():
            raise wrong(param, first.get_error().splitlines()[0])
        begins = np.flatnonzero(JsonConstraint(first.deep_copy(), self._model.vocabulary).allowed(()))
        if not set(begins.tolist()) - self._model.ends:  # such as a reference to itself alone
            raise wrong(param, "no text has the form of the schema")
        return lambda: JsonConstraint(first.deep_copy(), self._model.vocabulary)


def _adapted(model: ServedModel) -> Any:
    """Return a model's tokenizer as llguidance knows it."""
    from llguidance import LLTokenizer, TokenizerWrapper  # pyright: ignore[reportMissingImports] - optional

    tokenizer, ends = model.tokenizer, sorted(model.ends)
    if isinstance(tokenizer, JsonTokenizer):
        try:
            return LLTokenizer(tokenizer.to_json().decode(), n_vocab=model.vocabulary, eos_token=ends or None)
        except ValueError as error:
            raise wrong(PARAM, f"the model's tokenizer has no grammars: {error}") from None
    return LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, model.vocabulary, ends)), n_vocab=None)


class _Tokens:
    """A tokenizer of bytes or characters as llguidance's wrapper reads it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.decode([i]) if i < tokenizer.vocab_size else b"" for i in range(vocabulary)]
        if not ends:  # one more token, which the model does not have and never draws
            self.tokens.append(_NO_END.encode())
        self.eos_token_id = ends[0] if ends else vocabulary
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        try:
            return [int(token) for token in self._tokenizer.encode(text.encode())]
        except UserError:  # characters the training data did not have
            return []
