"""PCP's files of inference, rewards and gateways: the wrong command names the right one, which takes them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from planetary.cli.commands import serve
from planetary.cli.main import build_parser
from planetary.core.config import load_config
from planetary.core.errors import UserError
from planetary.run.kinds import kind_of
from planetary.runs.rl.config import RlConfig
from planetary.runs.serve.config import ServeConfig
from planetary.site.config import load_site

INFERENCE = {
    "model_id": "qwen2.5-0.5b-instruct",
    "pool_name": "default",
    "generation_vmfb_path": "models/qwen_rl_generation.vmfb",
    "generation_mlir_path": "models/qwen_rl_generation.mlir",
    "weights_path": "weights",
    "tokenizer_source": "byte",
    "tokenizer_path": None,
    "num_gen_data_inputs": 50,
    "max_context_tokens": 1024,
    "default_max_output_tokens": 128,
    "session_ttl_seconds": 600,
    "worker_backend": "cuda",
    "worker_target_arch": "sm_80",
    "api_token_env": "PCP_API_TOKEN",
}
REWARDS = {
    "model_path": "models/generation.mlir",
    "tokenizer": "qwen",
    "learning_rate": 1e-5,
    "grpo_config": {
        "num_iterations": 7,
        "group_size": 4,
        "learning_rate": 1e-6,
        "beta": 0.1,
        "prompt_file": "data/rl_prompts.bin",
        "num_prompts": 3,
        "weights_path": "weights",
    },
    "rollout_config": {"max_tokens": 128, "temperature": 0.7, "top_p": 0.9, "batch_size": 4},
    "prompts": ["What is the capital of France?"],
}
GATEWAY = {"gateway_id": "lab", "graph_backend": "memory", "federation": {"enabled": False}}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    for name, content in (("inference", INFERENCE), ("rewards", REWARDS), ("gateway", GATEWAY)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def _named(command: str, path: Path) -> dict[str, Any]:
    """Return the arguments of the command that an error names, from `planetary COMMAND PATH`."""
    import importlib

    from planetary.cli.command_table import COMMANDS

    words = ["gateway", "--gateway-config", str(path)] if command == "gateway" else [command, str(path)]
    args = build_parser(command).parse_args(words)
    with pytest.raises(UserError) as caught:
        importlib.import_module(COMMANDS[command].module).run(args)
    found = re.search(r": (planetary .*)$", str(caught.value))
    assert found is not None, str(caught.value)
    words = shlex.split(found.group(1))
    return vars(build_parser(words[1]).parse_args(words[1:]))


def test_train_names_the_command_of_each(files: Path) -> None:
    assert _named("train", files / "inference.json")["command"] == "serve"
    assert _named("train", files / "rewards.json")["command"] == "rl"
    assert _named("train", files / "gateway.json")["gateway_config"] == files / "gateway.json"


def test_other_commands_name_it_too(files: Path) -> None:
    assert _named("serve", files / "gateway.json")["command"] == "gateway"
    assert _named("rl", files / "gateway.json")["command"] == "gateway"


def test_serve_takes_the_file_of_inference(files: Path) -> None:
    config = serve._config(build_parser("serve").parse_args(["serve", str(files / "inference.json"), "--port", "0"]))
    assert (config.of(ServeConfig).name, config.of(ServeConfig).context, config.of(ServeConfig).port) == (
        "qwen2.5-0.5b-instruct",
        1024,
        0,
    )
    assert config.of(ServeConfig).model == str(files / "weights")
    assert kind_of(config).name == "serving"


def test_rl_takes_the_file_of_rewards(files: Path) -> None:
    config = load_config(files / "rewards.json", ["rl.task=reverse"])
    rl = config.of(RlConfig)
    assert (config.train.rounds, rl.groups, rl.completions, rl.max_tokens) == (7, 3, 4, 128)
    assert (rl.learning_rate, rl.kl, rl.objective, rl.start) == (1e-6, 0.1, "grpo", str(files / "weights"))
    assert kind_of(config).name == "reinforcement"


def test_gateway_takes_its_own(files: Path) -> None:
    assert load_site(files / "gateway.json").gateway_id == "lab"


def test_keys_without_effect_are_named(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_config(files / "rewards.json", ["rl.task=reverse"])
    load_config(files / "inference.json")
    told = "\n".join(caplog.messages)
    named = {*INFERENCE, *REWARDS["rollout_config"], *REWARDS["grpo_config"]}  # type: ignore[misc]
    used = {"model_id", "weights_path", "max_context_tokens", "max_tokens", "num_iterations", "group_size", "beta"}
    used |= {"learning_rate", "num_prompts", "tokenizer_path"}
    assert [key for key in named - used if key not in told] == []
