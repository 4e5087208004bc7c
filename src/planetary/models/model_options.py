"""Turning the keyword arguments of a `build` into a checked config struct."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from planetary.core import decoding
from planetary.core.errors import UserError

Options = TypeVar("Options", bound=msgspec.Struct)


def configure(model: str, kind: type[Options], options: Mapping[str, Any]) -> Options:
    """Return the `kind` that `options` describe, or raise `UserError` naming the wrong option."""
    try:
        return decoding.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise UserError(f"{model}: {error}; options are: {known}") from None


def require_counts(model: str, config: msgspec.Struct) -> None:
    """Raise `UserError` unless every integer option but the seed is at least 1."""
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, int) and not isinstance(value, bool) and name != "seed" and value < 1:
            raise UserError(f"{model}: {name} must be at least 1, found {value}")


def require_multiple(model: str, config: msgspec.Struct, name: str, factor: str, times: int = 1) -> None:
    """Raise `UserError` unless option `name` is a multiple of `times` × option `factor`."""
    whole, part = getattr(config, name), getattr(config, factor)
    if whole % (times * part):
        scale = f"{times} * {factor}" if times > 1 else factor
        raise UserError(f"{model}: {name} must be a multiple of {scale}, found {name}={whole}, {factor}={part}")


def refuse_tokens(model: str, options: Mapping[str, Any]) -> None:
    """Raise `UserError` where an image model is given the length of a text, as by a run on tokens."""
    if "sequence_length" in options:
        raise UserError(
            f"{model} classifies images, and has no sequence_length: the data of a run has to be columns of images and "
            'labels, data.columns = ["images", "labels"] (docs/data.md)'
        )
