"""Help texts list each command once, aligned, with its summary apart."""

from __future__ import annotations

import re

import pytest

from planetary.cli.command_table import COMMANDS
from planetary.cli.main import build_parser


def test_help_lists_each_command_once_and_aligned() -> None:
    lines = build_parser(None).format_help().splitlines()
    listed = [found for line in lines if (found := re.fullmatch(r"  ([a-z-]+)( {2,})(\S.*)", line))]
    summaries = {found[1]: found[3] for found in listed if found[1] in COMMANDS}
    assert summaries == {name: command.summary for name, command in COMMANDS.items()}
    assert len([found for found in listed if found[1] in COMMANDS]) == len(COMMANDS)
    assert len({found.start(3) for found in listed if found[1] in COMMANDS}) == 1


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_flag_stands_apart_from_its_help(name: str) -> None:
    """argparse puts a flag's help on a line of its own where both do not fit."""
    parser = build_parser(name)
    sub = next(action for action in parser._actions if hasattr(action, "choices") and action.choices)
    for line in sub.choices[name].format_help().splitlines():  # type: ignore[index]
        assert not re.match(r"  (-\S+, )?--[a-z-]+[A-Z]", line), line
