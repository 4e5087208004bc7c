from __future__ import annotations

import importlib
import runpy
import shlex
from pathlib import Path
from typing import NoReturn

import pytest

from planetary.cli.command_table import COMMANDS
from planetary.cli.main import build_parser
from planetary.core.config import load_config
from planetary.core.tensors import DTYPE_NAMES, TensorSpec
from planetary.data.prepare import prepare

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_reports_workload_has_its_global_batch_and_no_port() -> None:
    """The report's workload has its global batch and leaves the dashboard its port."""
    config = load_config(EXAMPLES / "nanochat-92m.toml")
    assert config.train.batch_size * config.fabric.workers == 8
    given = build_parser("gateway").parse_args(["gateway", "--gateway-config", "x.toml"])
    assert config.fabric.port != given.gateway_port


@pytest.mark.slow
def test_diffusion_example_has_the_columns_of_its_loss(tmp_path: Path) -> None:
    config = load_config(EXAMPLES / "diffusion.toml")
    data = prepare(config, tmp_path / "cache")
    assert data.notes == (f"{config.data.source}: 4000 examples of image: ui8[8, 8], label: i32[]",)
    _, _, batch = runpy.run_path(str(EXAMPLES / "diffusion.py"))["build"](batch_size=32)
    assert data.layout is not None
    data.layout.check([TensorSpec(n, DTYPE_NAMES[a.dtype], a.shape) for n, a in batch.items()], 32, "")


def test_chat_examples_train_what_the_assistant_says(tmp_path: Path) -> None:
    """The script's chats, pairs and tokenizer are those that chat.toml and dpo.toml name."""
    script = runpy.run_path(str(EXAMPLES / "chat_data.py"))
    script["main"].__globals__["FOLDER"] = tmp_path / "chat"
    script["main"]()
    (tmp_path / "chat.toml").write_text((EXAMPLES / "chat.toml").read_text())
    data = prepare(load_config(tmp_path / "chat.toml"), tmp_path / "cache")
    kind, share = data.notes
    assert "MB of chats; the first begins '<|im_start|>user\\nWhat is " in kind
    assert share == "of the training tokens 23.5% are targets: what the assistant says"
    assert (data.train.dtype, data.vocab_size) == ("i16", 258)
    (tmp_path / "dpo.toml").write_text((EXAMPLES / "dpo.toml").read_text())
    _, pairs = prepare(load_config(tmp_path / "dpo.toml"), tmp_path / "cache").notes
    assert pairs.startswith("2000 pairs of answers, of which ")


class AcceptedError(Exception):
    """A command has checked its configuration, and would begin now."""


def _begin(*_: object, **__: object) -> NoReturn:
    raise AcceptedError


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_first_command_of_an_example_accepts_it(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first `planetary` command that an example's comment names takes the file."""
    comment = path.read_text().replace("\\\n#", "").splitlines()
    words = shlex.split(next(line for line in comment if line.startswith("#     planetary "))[1:], comments=True)[1:]
    assert f"examples/{path.name}" in words
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.setattr("planetary.cli.commands.train.train_here", _begin)
    monkeypatch.setattr("planetary.site.gateway_process.host_run", _begin)
    args = build_parser(words[0]).parse_args(words)
    with pytest.raises(AcceptedError):
        importlib.import_module(COMMANDS[words[0]].module).run(args)
