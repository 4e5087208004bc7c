"""The list of commands, and how each one's parser is made. Knows the modules by name only and imports none.

A command is a module with `add_parser(subparsers) -> ArgumentParser` and `run(args) -> int`. Whatever is heavy (JAX,
the compiler, rich, matplotlib) is imported inside `run`, so `--help` is instant and the roles of a bare install
(worker, supervisor, node manager) work without the extras.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A command's module and summary."""

    module: str
    summary: str  # one line for `planetary --help`
    group: str


_IN = "planetary.cli.commands."

COMMANDS: dict[str, Command] = {
    "train": Command(
        "planetary.cli.commands.train", "train a model on this machine: gateway, node manager and workers", "run"
    ),
    "rl": Command(_IN + "rl", "train a policy by the rewards of its own texts, on this machine", "run"),
    "watch": Command(
        "planetary.cli.commands.watch", "follow a run in the terminal: its folder, or its dashboard's URL", "run"
    ),
    "dashboard": Command(_IN + "dashboard", "show a run folder as a page in the browser", "run"),
    "generate": Command(_IN + "generate", "continue a text with a trained model", "run"),
    "evaluate": Command(_IN + "evaluate", "evaluate a trained or published model on held-out data", "run"),
    "serve": Command(_IN + "serve", "serve a trained model over HTTP, as OpenAI's interface", "run"),
    "gateway": Command(
        "planetary.cli.commands.roles.gateway", "coordinate a run that workers on other machines join", "roles"
    ),
    "federation-hub": Command(_IN + "roles.federation_hub", "merge the models that several sites train", "roles"),
    "node-manager": Command(
        "planetary.cli.commands.roles.node_manager", "keep a number of workers running on this machine", "roles"
    ),
    "supervisor": Command(
        "planetary.cli.commands.roles.supervisor", "keep one worker running (started by a node manager)", "roles"
    ),
    "worker": Command(_IN + "roles.worker", "train for a gateway (started by a supervisor)", "roles"),
    "master": Command(_IN + "roles.master", "lead rings of peers that use planetary.collectives", "roles"),
    "jobs": Command(_IN + "jobs", "submit, list, show and cancel the jobs of a gateway", "run"),
    "status": Command(_IN + "status", "show a gateway's jobs and workers once", "run"),
    "token": Command(_IN + "token", "make, list and revoke tokens of the gateway's control API", "tools"),
    "invite": Command(_IN + "invite", "print a token that lets a machine join a run", "tools"),
    "export": Command(_IN + "export", "write a JAX model as StableHLO with its manifest", "tools"),
    "compile": Command(
        "planetary.cli.commands.models.compile", "compile and verify a model's training step for a target", "tools"
    ),
    "tune": Command(
        "planetary.cli.commands.models.tune", "find the compiler flags that run a training step fastest here", "tools"
    ),
    "parity": Command(
        "planetary.cli.commands.models.parity", "train on two backends and measure how far they drift apart", "tools"
    ),
    "artifact": Command(_IN + "models.artifact", "show, verify or clear away compiled steps", "tools"),
    "moe": Command("planetary.cli.commands.moe", "the cost of a mixture; its ordinary model", "tools"),
    "doctor": Command(_IN + "doctor", "examine this machine and its links, with remedies", "tools"),
    "plan": Command(_IN + "plan", "predict the cost of each synchronisation preset on a cluster", "tools"),
    "report": Command(_IN + "report", "write report.json and loss.png of a run folder again", "tools"),
}

GROUPS: dict[str, str] = {
    "run": "train and use a model",
    "roles": "roles of a run on several machines",
    "tools": "tools",
}


class LazyHelp(str):
    """A flag's help that is found when it is shown."""

    def text(self) -> str:
        raise NotImplementedError


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions and examples, and gives long flags enough room."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action.help, LazyHelp):
            return action.help.text().replace("%", "%%")
        return super()._get_help_string(action)


def command_parser(
    subparsers: Any, name: str, *, examples: Sequence[str], description: str = ""
) -> argparse.ArgumentParser:
    """Add and return the parser of command `name`, whose help ends with `examples` (whole command lines).

    `description` is longer than the summary in the list of commands; the summary is used when it is empty.
    """
    summary = COMMANDS[name].summary
    text = textwrap.fill(" ".join((description or f"{summary[0].upper()}{summary[1:]}.").split()), 88)
    shown = "\n".join(f"  {line}" for line in examples)
    return subparsers.add_parser(
        name,
        help=summary,
        description=text,
        epilog=f"example{'s' if len(examples) > 1 else ''}:\n{shown}",
        formatter_class=HelpFormatter,
    )


def action_parser(actions: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    """Add and return the parser of an action of a command; `example` is a whole command line."""
    return actions.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=HelpFormatter,
    )
