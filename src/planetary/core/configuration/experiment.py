"""PCP's `experiment.json`: each of its keys, and the key here that does the same.

The format is that of PCP's own files (github.com/deltawave-tech/pcp: `experiments/*.json`, `ExperimentConfig`), in both
of its shapes: all keys side by side, or grouped into blocks. A key that has no counterpart is named in a warning with
the reason; nothing is dropped in silence.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planetary.core.errors import UserError, did_you_mean

log = logging.getLogger(__name__)

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
"""What PCP takes for a key that is absent, where the default here is another."""

FIXED: Mapping[str, Mapping[str, Any]] = {
    "optimizer": {
        "schedule": "constant",
        "warmup_steps": 0,
        "beta2": 0.999,
        "weight_decay": 0.01,
        "decay_min_rank": 0,
    },
}
"""What no key of PCP's sets and PCP does in a way that is not the default here: AdamW at a constant rate, which decays
every parameter (`src/optimizers/adam_mlir.zig`). `--set` changes it."""

BLOCKS: Mapping[str, Mapping[str, str]] = {
    "artifacts": {},
    "dataset": {"path": "data_path"},
    "distributed": {"local_steps_per_round": "tau", "outer_momentum": "nesterov_momentum"},
    "decoupled_diloco": {},
    "outputs": {},
}
"""Block of the grouped shape -> its keys that have another name when all keys stand side by side."""

_LEASES = "a lease is always the sequences of one round of one worker (tau × batch_size); PCP calls that diloco_slices"
_NO_PROJECT = "without wandb_project nothing is sent to wandb"
_DECOUPLED = "training is plain DiLoCo, without fragments that are merged at different times"

WANDB_KEYS: Mapping[str, str] = {"wandb_project": "project", "wandb_entity": "entity"}
"""Key of PCP's `experiment.json` -> key of the sink that its `wandb_project` stands for."""

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
"""Value of a key in `NO_EFFECT` that describes what happens here anyway, and needs no warning."""

_NOT_PRETRAINING = (
    "it belongs to reinforcement learning or inference; `planetary train` trains on the tokens of data_path"
)
REFUSED: Mapping[str, str] = {
    "wandb_api_key": (
        "a key in a file is copied, committed and logged with it. Remove it and set the environment variable "
        "WANDB_API_KEY instead"
    ),
    **dict.fromkeys(("grpo_config", "rollout_config", "training_model_path", "weights_path"), _NOT_PRETRAINING),
}
"""Key that is an error when it has a value -> why."""


def experiment_tables(text: str, origin: str, folder: Path) -> dict[str, Any]:
    """Return the tables that an `experiment.json` stands for; `null` and an empty string count as an absent key.

    Warns once of the keys that have no effect. A path is taken from `folder` or, as PCP takes it, from the current
    folder: whichever has the file.

    Raises:
        UserError: the text is no JSON object, or a key in it is unknown or refused.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{origin} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{origin}: expected one JSON object with PCP's experiment keys, found {type(values).__name__}")
    given = {key: value for key, value in _flat(values, origin).items() if value not in (None, "", {})}
    for key in given:
        _check_key(key, origin)
    _warn(given, origin)
    return _tables({**_defaults(given), **given}, folder)


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
        if key not in values:
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
