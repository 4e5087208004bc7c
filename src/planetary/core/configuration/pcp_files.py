"""PCP's files of inference and of reinforcement learning, by each of their keys and the key here that means the same.

The formats are those of PCP's own files (github.com/deltawave-tech/pcp: `experiments/inference_*.json`,
`*_rl_test.json`, `gateway_local.json`). Weights and generation functions in PCP's own forms are not read: the key that
names them names the folder of the pretrained model here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planetary.core.errors import UserError, did_you_mean
from planetary.core.printable import command_line

log = logging.getLogger(__name__)

_FUNCTIONS = "the functions are made of the model's own code, for each worker's device"
_WORKERS = "workers say which backend and target they have"
_ENDPOINT = "the endpoint has no sessions, and keys of its own (serve.keys)"
_OF_FOLDER = "it comes from the model's folder"
_WHOLE = "samples are drawn from the whole distribution"
_ABSENT = "there is none here"

SERVING_KEYS: Mapping[str, str] = {
    "model_id": "serve.name",
    "weights_path": "serve.model",
    "max_context_tokens": "serve.context",
}
REWARD_KEYS: Mapping[str, str] = {
    "num_iterations": "train.rounds",
    "num_prompts": "rl.groups",
    "group_size": "rl.completions",
    "learning_rate": "rl.learning_rate",
    "beta": "rl.kl",
    "weights_path": "rl.start",
    "prompt_file": "rl.prompts",
    "max_tokens": "rl.max_tokens",
    "seed": "run.seed",
}
_SERVING_WITHOUT: Mapping[str, str] = {
    **dict.fromkeys(("generation_vmfb_path", "generation_mlir_path", "generation_contract_path"), _FUNCTIONS),
    **dict.fromkeys(("num_gen_data_inputs", "weights_format", "weights_dtype"), _FUNCTIONS),
    **dict.fromkeys(("worker_backend", "worker_target_arch", "pool_name"), _WORKERS),
    **dict.fromkeys(("tokenizer_source", "tokenizer_path", "chat_template", "eos_token"), _OF_FOLDER),
    **dict.fromkeys(("session_ttl_seconds", "request_timeout_seconds", "api_token_env"), _ENDPOINT),
    "default_max_output_tokens": "a request says how many tokens it wants",
    **dict.fromkeys(("vision_enabled", "mtp_enabled", "full_conditional_generation_enabled"), _ABSENT),
}
_REWARD_WITHOUT: Mapping[str, str] = {
    **dict.fromkeys(("generation_vmfb_path", "generation_mlir_path", "training_mlir_path", "model_path"), _FUNCTIONS),
    **dict.fromkeys(("num_gen_data_inputs", "training_model_path"), _FUNCTIONS),
    **dict.fromkeys(("temperature", "top_p", "top_k"), _WHOLE),
    "tokenizer": _OF_FOLDER,
    "batch_size": "the gateway decides how many texts a worker samples at once",
    "prompts": "prompts are a file, rl.prompts",
    **dict.fromkeys(("nesterov_momentum", "tau", "outer_loop_steps"), "a round of rewards has one step"),
    **dict.fromkeys(("wandb_run_name", "wandb_entity", "wandb_project"), "give a sink: [[sinks]] with kind = 'wandb'"),
}
PROMPT_FILES = (".jsonl", ".csv", ".parquet")


def is_gateway_file(tables: Mapping[str, Any]) -> bool:
    """Whether tables are those of a gateway with controllers."""
    return "gateway_id" in tables or "controllers" in tables


def refuse_gateway_file(tables: Mapping[str, Any], origin: str) -> None:
    """Raise `UserError` for the tables of a gateway, which are no configuration of a run."""
    if is_gateway_file(tables):
        command = command_line("gateway", "--gateway-config", origin)
        raise UserError(f"{origin} is the file of a gateway with controllers, and of no run. It is taken by: {command}")


def is_serving_file(values: Mapping[str, Any]) -> bool:
    """Whether an object is PCP's configuration of inference."""
    return "model_id" in values or ("generation_mlir_path" in values and "grpo_config" not in values)


def is_reward_file(values: Mapping[str, Any]) -> bool:
    """Whether an object is PCP's configuration of reinforcement learning."""
    return "grpo_config" in values


def serving_tables(values: Mapping[str, Any], origin: str, found: Callable[[str], str]) -> dict[str, Any]:
    """Return the tables of a file of inference; `found` completes a path. Warns of keys without effect."""
    given = {key: value for key, value in values.items() if value not in (None, "", {}, False)}
    tables = _tables(given, SERVING_KEYS, _SERVING_WITHOUT, origin, "inference")
    tables.setdefault("serve", {})["model"] = found(str(given.get("weights_path", "")))
    if not Path(tables["serve"]["model"]).is_dir():
        log.warning(
            "%s: weights_path: expected the folder of the model (config.json, model.safetensors, tokenizer.json), of "
            "which PCP's own file of weights was made: write it there, or give --set serve.model=FOLDER",
            origin,
        )
    return tables


def reward_tables(values: Mapping[str, Any], origin: str, found: Callable[[str], str]) -> dict[str, Any]:
    """Return the tables of a file of reinforcement learning, as `serving_tables`."""
    flat: dict[str, Any] = {
        key: value for key, value in values.items() if key not in ("grpo_config", "rollout_config", "learning_rate")
    }
    for block in ("rollout_config", "grpo_config"):
        if not isinstance(inner := values.get(block) or {}, Mapping):
            raise UserError(f"{origin}: {block}: expected a JSON object, found {type(inner).__name__}")
        flat |= inner
    given = {key: value for key, value in flat.items() if value not in (None, "", {}, [])}
    if not str(given.get("prompt_file", "")).endswith(PROMPT_FILES) and given.pop("prompt_file", ""):
        log.warning("%s: prompt_file: no effect: expected rl.prompts, a file %s", origin, ", ".join(PROMPT_FILES))
    tables = _tables(given, REWARD_KEYS, _REWARD_WITHOUT, origin, "reinforcement learning")
    for key in ("start", "prompts"):
        if key in tables.get("rl", {}):
            tables["rl"][key] = found(str(tables["rl"][key]))
    tables.setdefault("rl", {}).setdefault("objective", "grpo")
    return tables


def _tables(
    given: Mapping[str, Any], keys: Mapping[str, str], without: Mapping[str, str], origin: str, what: str
) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    reasons: dict[str, list[str]] = {}
    for key, value in given.items():
        if key in keys:
            section, name = keys[key].split(".")
            tables.setdefault(section, {})[name] = value
        elif key in without:
            reasons.setdefault(without[key], []).append(key)
        elif key == "wandb_api_key":
            raise UserError(f"{origin}: wandb_api_key: set the environment variable WANDB_API_KEY instead")
        else:
            meant = did_you_mean(key, [*keys, *without])
            raise UserError(f"{origin}: unknown key {key} of PCP's file of {what}{meant}")
    for reason, names in reasons.items():
        log.warning("%s: %s: no effect: %s", origin, ", ".join(names), reason)
    return tables
