"""Flags that set a key of the configuration. Type, range, default and meaning are those of the key in the schema."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

from msgspec import inspect

from planetary.cli.command_table import LazyHelp
from planetary.core.configuration.keys import FIELDS, SECTIONS
from planetary.core.configuration.ranges import describe
from planetary.core.configuration.strict import value_from_text
from planetary.core.configuration.toml import toml_value

Flags = Mapping[str, str]
"""Flag -> the key it sets: `{"--port": "serve.port"}`."""

TRAIN_FLAGS: Flags = {"--workers": "fabric.workers", "--rounds": "train.rounds"}
"""Of the commands that train on this machine."""

_METAVARS = {"--workers": "N", "--rounds": "R", "--batch": "N", "--cache-mb": "MB", "--context": "TOKENS"}


class KeyHelp(LazyHelp):
    """The key's dotted name, shown as meaning, range and default."""

    default: Any = None
    """Of a flag whose default is not the key's; None: it is."""
    meaning = ""
    """Of a flag that sets the key's value for another purpose; empty: the key's."""
    required = False
    """Whether there is no default."""

    def text(self) -> str:
        from planetary.core.configuration.key_meanings import meanings

        section, name = self.split(".")
        kind, meaning = FIELDS[section][name].type, self.meaning or meanings(SECTIONS[section])[name]
        default = default_of(self) if self.default is None else self.default
        takes = [] if _is_free(kind) else [describe(kind)]
        usual = [] if default in ("", False) or self.required else [f"default: {default}"]
        meaning = meaning.partition("; empty:")[0] if self.required else meaning
        return f"{meaning} [{'; '.join([str(self), *takes, *usual])}]"


def default_of(key: str) -> Any:
    """Return the default of a key, such as `"fabric.workers"`."""
    section, name = key.split(".")
    return FIELDS[section][name].default


def required_key(key: str) -> KeyHelp:
    """Return the help of a required argument for a key."""
    text = KeyHelp(key)
    text.required = True
    return text


def add_key_flag(parser: Any, flag: str, key: str, *, default: Any = None, meaning: str = "") -> None:
    """Add the flag of a key.

    Args:
        parser: a parser, or a group of arguments.
        flag: such as `"--port"`.
        key: such as `"serve.port"`.
        default: of the flag in place of the configuration's value; None: a flag that is not given is None.
        meaning: for a command that needs the value for another purpose; empty: the key's.
    """
    section, name = key.split(".")
    text = KeyHelp(key)
    text.default, text.meaning = default, meaning
    if isinstance(FIELDS[section][name].type, inspect.BoolType):
        parser.add_argument(flag, action="store_const", const=True, help=text)
        return
    value = partial(value_from_text, section, name, origin=flag)
    metavar = _METAVARS.get(flag, name.rpartition("_")[2].upper())
    parser.add_argument(flag, type=value, default=default, metavar=metavar, help=text)


def add_key_flags(parser: Any, flags: Flags) -> None:
    """Add the flags of several keys; one that is not given is None."""
    for flag, key in flags.items():
        add_key_flag(parser, flag, key)


def given_keys(args: argparse.Namespace, flags: Flags) -> dict[str, Any]:
    """Return the keys of the flags that were given, with their values."""
    values = {key: getattr(args, flag.removeprefix("--").replace("-", "_")) for flag, key in flags.items()}
    return {key: value for key, value in values.items() if value is not None}


def settings_of(args: argparse.Namespace, flags: Flags) -> list[str]:
    """Return the flags given as settings, `section.key=value`."""
    return [f"{key}={toml_value(value)}" for key, value in given_keys(args, flags).items()]


def _is_free(kind: inspect.Type) -> bool:
    """Whether a key takes any text, or is a switch, so the range need not be named."""
    bare = kind.type if isinstance(kind, inspect.Metadata) else kind
    return isinstance(bare, inspect.StrType | inspect.BoolType)
