"""The settings beside a `tokenizer.json` that change tokens, as transformers applies them.

docs/data.md has the table of all settings, with those of vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from planetary.core.errors import UserError

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens in the settings."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class NamedToken(msgspec.Struct, frozen=True):
    """A token matched in a text before everything else.

    Attributes:
        content: text of the token.
        id: required id; None: the vocabulary's, if any.
        flags: as the `tokenizers` library takes them, in the order of their names.
    """

    content: str
    id: int | None
    flags: tuple[tuple[str, bool], ...]


class TokenizerSettings(msgspec.Struct, frozen=True):
    """What the files beside a `tokenizer.json` add to it.

    Attributes:
        tokens: added tokens, in the order in which transformers adds them.
        names: text of each special token, by name such as `eos_token`, those of the model alone included.
        splits_special: whether special tokens in a text are split like other text.
    """

    tokens: tuple[NamedToken, ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    splits_special: bool = False


def read_settings(folder: Path) -> TokenizerSettings:
    """Return the settings in a folder; those without effect where it has none.

    Raises:
        UserError: a file is malformed; the text names it and the key.
    """
    settings = _mapping(folder / TOKENIZER_CONFIG_FILE)
    where = folder / TOKENIZER_CONFIG_FILE
    decoder = settings.get("added_tokens_decoder")
    tokens: list[NamedToken] = []
    if decoder is None:  # as older folders have it
        settings = {**settings, **_mapping(folder / SPECIAL_TOKENS_FILE)}
        special = {_text_of(settings.get(name)) for name in SPECIAL_TOKENS}
        for content, number in _mapping(folder / ADDED_TOKENS_FILE).items():
            flags = {"special": content in special, "normalized": content not in special}
            tokens.append(NamedToken(content, _id_of(number, folder / ADDED_TOKENS_FILE), _flags(flags)))
    elif isinstance(decoder, Mapping):
        for number, value in decoder.items():
            if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
                raise UserError(f"{where}: added_tokens_decoder has {value!r} for {number}: expected an added token")
            tokens.append(NamedToken(value["content"], _id_of(number, where), _flags(value)))
    else:
        raise UserError(f"{where}: added_tokens_decoder is {type(decoder).__name__}: expected tokens by their ids")
    tokens.sort(key=lambda token: token.id or 0)
    extra = settings.get("extra_special_tokens", settings.get("additional_special_tokens")) or ()
    if not isinstance(extra, list | tuple | Mapping):
        raise UserError(f"{where}: extra_special_tokens is {type(extra).__name__}: expected a list, or tokens by names")
    named = {**(extra if isinstance(extra, Mapping) else {}), **{name: settings.get(name) for name in SPECIAL_TOKENS}}
    names = {name: text for name, value in named.items() if (text := _text_of(value)) is not None}
    for one in (*named.values(), *(() if isinstance(extra, Mapping) else extra)):
        if (text := _text_of(one)) is not None:
            flags = {**one, "special": True} if isinstance(one, Mapping) else {"special": True}
            tokens.append(NamedToken(text, None, _flags(flags)))
    return TokenizerSettings(tuple(tokens), tuple(names.items()), settings.get("split_special_tokens") is True)


def read_template(folder: Path) -> str:
    """Return the chat template beside a tokenizer; "": there is none. Raises `UserError` where it cannot be read."""
    try:
        return (folder / TEMPLATE_FILE).read_text("utf-8")
    except FileNotFoundError:
        found = _mapping(folder / TOKENIZER_CONFIG_FILE).get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {folder / TEMPLATE_FILE}: {getattr(error, 'strerror', None) or error}") from None
    if isinstance(found, list):  # several, by name
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    return found if isinstance(found, str) else ""


def _mapping(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def _text_of(value: Any) -> str | None:
    """Return the text of a special token, which may be an object with flags; None: there is none."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) and text else None


def _id_of(number: Any, where: Path) -> int:
    try:
        found = int(number)
    except (TypeError, ValueError):
        found = -1
    if not 0 <= found < 2**31:
        raise UserError(f"{where}: {number!r} is no id of a token: expected a number from 0 to 2**31 - 1")
    return found


def _flags(value: Mapping[str, Any]) -> tuple[tuple[str, bool], ...]:
    given = {name: value[name] is True for name in _FLAGS if name in value}
    given.setdefault("normalized", not given.get("special", False))
    return tuple(sorted(given.items()))
