"""PCP's files of runs: experiments, inference and reinforcement learning, by the key here for each of their keys.

The formats are those of PCP's own files (github.com/deltawave-tech/pcp: `experiments/*.json`, `ExperimentConfig`;
`inference_*.json`, `*_rl_test.json`). Those of experiments have two shapes: all keys side by side, or grouped into
blocks. A key without counterpart is named in a warning with the reason; nothing is dropped in silence. Weights and
generation functions in PCP's own forms are not read: the key that names them names the folder of the pretrained model
here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from planetary.core.bounded_text import json_value
from planetary.core.config import is_gateway_file
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


def is_serving_file(values: Mapping[str, Any]) -> bool:
    """Whether an object is PCP's configuration of inference."""
    return "model_id" in values or ("generation_mlir_path" in values and "grpo_config" not in values)


def is_reward_file(values: Mapping[str, Any]) -> bool:
    """Whether an object is PCP's configuration of reinforcement learning."""
    return "grpo_config" in values


def serving_tables(values: Mapping[str, Any], origin: str, found: Callable[[str], str]) -> dict[str, Any]:
    """Return the tables of a file of inference; `found` completes a path. Warns of keys without effect."""
    given = {key: value for key, value in values.items() if value not in (None, "", {}, False)}
    tables = _translated(given, SERVING_KEYS, _SERVING_WITHOUT, origin, "inference")
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
    tables = _translated(given, REWARD_KEYS, _REWARD_WITHOUT, origin, "reinforcement learning")
    for key in ("start", "prompts"):
        if key in tables.get("rl", {}):
            tables["rl"][key] = found(str(tables["rl"][key]))
    tables.setdefault("rl", {}).setdefault("objective", "grpo")
    return tables


def _translated(
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


# --- experiments ------------------------------------------------------------------------------------------

EXPERIMENT_KEYS: Mapping[str, str] = {
    "model_path": "model.source",
    "data_path": "data.source",
    "tokenizer": "data.tokenizer",
    "sampling": "data.sampling",
    "chunk_shuffle": "data.shuffle_leases",
    "max_epochs": "data.max_epochs",
    "learning_rate": "optimizer.learning_rate",
    "dtype": "train.precision",
    "batch_size": "train.batch_size",
    "effective_batch_size": "train.batch_size",
    "block_size": "train.sequence_length",
    "tau": "train.inner_steps",
    "outer_loop_steps": "train.rounds",
    "nesterov_momentum": "outer.momentum",
    "outer_learning_rate": "outer.learning_rate",
    "seed": "run.seed",
    "wandb_run_name": "run.name",
}
"""Key of PCP's `experiment.json` -> the key here that means the same."""

DEFAULTS: Mapping[str, Any] = {
    "tokenizer": "char",
    "chunk_shuffle": True,
    "max_epochs": 10,
    "learning_rate": 0.001,
    "tau": 10,
    "outer_loop_steps": 100,
    "nesterov_momentum": 0.9,
}
"""PCP's default of a key, where the default here is another."""

FIXED: Mapping[str, Mapping[str, Any]] = {
    "optimizer": {
        "schedule": "constant",
        "warmup_steps": 0,
        "beta2": 0.999,
        "weight_decay": 0.01,
        "decay_min_rank": 0,
    },
}
"""Fixed behaviour of PCP, without a key, that is not the default here: AdamW at a constant rate, which decays
every parameter (`src/optimizers/adam_mlir.zig`). `--set` changes it."""

BLOCKS: Mapping[str, Mapping[str, str]] = {
    "artifacts": {},
    "dataset": {"path": "data_path"},
    "distributed": {"local_steps_per_round": "tau", "outer_momentum": "nesterov_momentum"},
    "decoupled_diloco": {},
    "outputs": {},
}
"""Block of the grouped shape -> keys with another name in the flat shape."""

_LEASES = "a lease is always the sequences of one round of one worker (tau × batch_size); PCP calls that diloco_slices"
_NO_PROJECT = "without wandb_project nothing is sent to wandb"
_DECOUPLED = "training is plain DiLoCo, without fragments that are merged at different times"

WANDB_KEYS: Mapping[str, str] = {"wandb_project": "project", "wandb_entity": "entity"}
"""Key of PCP's `experiment.json` -> key of the sink for `wandb_project`."""

NO_EFFECT: Mapping[str, str] = {
    "chunk_manifest_path": "leases are cut from the whole data file; to train on a part of it, give it as a file",
    "chunk_size": _LEASES,
    "chunk_size_bytes": _LEASES,
    "chunk_size_mode": _LEASES,
    "checkpoint_dir": "checkpoints are kept in the run's folder, runs/NAME/checkpoints",
    "should_resume": "a run is resumed with: planetary train --resume runs/NAME",
    "use_in_graph_accumulation": "a batch is split in the graph wherever train.micro_batches is above 1",
    "aggregation_strategy": _DECOUPLED,
    "num_fragments": _DECOUPLED,
    "sync_interval_h": _DECOUPLED,
    "overlap_tau": _DECOUPLED,
    "min_quorum": _DECOUPLED,
    "grace_window_ms": _DECOUPLED,
    "grace_gamma": _DECOUPLED,
    "max_grace_steps": _DECOUPLED,
    "adaptive_grace_enabled": _DECOUPLED,
    "merge_strategy": _DECOUPLED,
    "fragment_strategy": _DECOUPLED,
    "learner_alpha": _DECOUPLED,
    "outer_gradient_compression": _DECOUPLED,
    "max_recovery_syncer_steps": _DECOUPLED,
    "embedding_tensor_indices": _DECOUPLED,
}
"""Key that nothing here corresponds to -> why."""

SAME_HERE: Mapping[str, Any] = {
    "chunk_size_mode": "diloco_slices",
    "should_resume": False,
    "use_in_graph_accumulation": True,
    "aggregation_strategy": "diloco",
    "outer_gradient_compression": "none",
}
"""Value of a key in `NO_EFFECT` that equals the behaviour here, and needs no warning."""

_NOT_PRETRAINING = (
    "it belongs to reinforcement learning or inference; `planetary train` trains on the tokens of data_path"
)
REFUSED: Mapping[str, str] = {
    "wandb_api_key": (
        "a key in a file is copied, committed and logged with it. Remove it and set the environment variable "
        "WANDB_API_KEY instead"
    ),
    **dict.fromkeys(("rollout_config", "training_model_path", "weights_path"), _NOT_PRETRAINING),
}
"""Key that is an error when it has a value -> why."""


def run_tables(text: str, path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the tables a file stands for; `null` and an empty string count as an absent key.

    Warns once of the keys without effect. A path is taken from the file's folder or, as PCP takes it, from the current
    folder: whichever has the file.

    Args:
        text: of the file.
        path: of the file.
        overrides: settings on the command line.

    Raises:
        UserError: the text is no JSON object, a key in it is unknown or refused, or the reward is not named.
    """
    origin, folder = str(path), path.resolve().parent
    values = json_value(text, origin)
    if not isinstance(values, dict):
        raise UserError(f"{origin}: expected one JSON object with PCP's experiment keys, found {type(values).__name__}")
    if is_gateway_file(values):
        return values
    if is_reward_file(values):
        _refuse_without_reward(path, overrides)
        return reward_tables(values, origin, lambda name: _found(name, folder))
    if is_serving_file(values):
        return serving_tables(values, origin, lambda name: _found(name, folder))
    given = {key: value for key, value in _flat(values, origin).items() if value not in (None, "", {})}
    for key in given:
        _check_key(key, origin)
    _warn(given, origin)
    return _tables({**_defaults(given), **given}, folder)


def _refuse_without_reward(path: Path, overrides: Sequence[str]) -> None:
    if not any(one.replace(" ", "").startswith("rl.task=") for one in overrides):
        again = command_line("rl", path, "--set", "rl.task=FILE.py:CLASS")
        raise UserError(
            f"{path} is PCP's file of reinforcement learning, whose reward is in PCP's code: name a task. It is taken "
            f"by: {again}"
        )


def _flat(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key not in BLOCKS:
            flat[key] = value
            continue
        if not isinstance(value, dict):
            raise UserError(f"{origin}: {key}: expected a JSON object, found {type(value).__name__}")
        flat |= {BLOCKS[key].get(name, name): inner for name, inner in value.items()}
    return flat


def _check_key(key: str, origin: str) -> None:
    if key in REFUSED:
        raise UserError(f"{origin}: {key}: {REFUSED[key]}")
    known = [*EXPERIMENT_KEYS, *WANDB_KEYS, *NO_EFFECT]
    if key not in known:
        raise UserError(
            f"{origin}: unknown key {key}{did_you_mean(key, known)} "
            f"Keys of experiment.json: {', '.join([*EXPERIMENT_KEYS, *WANDB_KEYS])}. Anything else needs TOML"
        )


def _warn(given: Mapping[str, Any], origin: str) -> None:
    reasons: dict[str, list[str]] = {}
    for key, value in given.items():
        if key in NO_EFFECT and not (key in SAME_HERE and value == SAME_HERE[key]):
            reasons.setdefault(NO_EFFECT[key], []).append(key)
    if "chunk_shuffle" in given and given.get("sampling", "random") != "fifo":
        why = 'it orders the chunks of sampling = "fifo"; sequences are drawn from the whole file otherwise'
        reasons.setdefault(why, []).append("chunk_shuffle")
    if "wandb_entity" in given and "wandb_project" not in given:
        reasons.setdefault(_NO_PROJECT, []).append("wandb_entity")
    for reason, keys in reasons.items():
        log.warning("%s: %s: no effect: %s", origin, ", ".join(keys), reason)


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    defaults = dict(DEFAULTS)
    if given.get("sampling") != "fifo":
        del defaults["chunk_shuffle"]
    if re.search(r"\.u\d+$", str(given.get("data_path", ""))):
        del defaults["tokenizer"]  # the file holds tokens already
    return defaults


def _tables(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    tables: dict[str, Any] = {section: dict(fixed) for section, fixed in FIXED.items()}
    for key, dotted in EXPERIMENT_KEYS.items():  # in this order: an effective batch is the one that counts
        if key not in values or (key == "chunk_shuffle" and values.get("sampling") != "fifo"):
            continue
        value = values[key]
        if key in {"model_path", "data_path"} and isinstance(value, str):
            value = _found(value, folder)
        if key == "wandb_run_name" and isinstance(value, str):
            value = re.sub(r"[\\/]+", "-", value)  # it names a folder here
        section, name = dotted.split(".")
        tables.setdefault(section, {})[name] = value
    if "wandb_project" in values:
        sink = {name: values[key] for key, name in WANDB_KEYS.items() if key in values}
        tables["sinks"] = [{"kind": "wandb", **sink}]
    return tables


def _found(path: str, folder: Path) -> str:
    """Return a path that holds from `folder` and is left as it is when neither place has the file."""
    if "://" not in path and not (folder / path).exists() and Path(path).exists():
        return str(Path(path).absolute())
    return path
