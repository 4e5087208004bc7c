"""The identity of a run: a hash of every key that decides the mathematics."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from planetary.core.configuration.keys import extension_keys
from planetary.core.configuration.schema import Config, SyncConfig
from planetary.core.registry import file_of


def config_hash(config: Config) -> str:
    """Return the sha256 (hex) of everything that decides the mathematics of a run.

    Two configurations with equal hashes train the same model on the same data in the same way, so a checkpoint of one
    may be resumed under the other. Left out are names, places, machines, time limits, how often something is written or
    measured, options that only save memory, and how long the run is: a finished run may be resumed with more rounds,
    and a cosine schedule is then stretched from there on. Of a local path only the last part counts, so a folder may be
    moved; digests of the contents are kept in the checkpoint.
    """
    text = json.dumps(_mathematics(config), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def mathematical_changes(before: Config, after: Config) -> list[tuple[str, Any, Any]]:
    """Return key, old and new value of all that makes the `config_hash` of two configurations differ."""
    old, new = (_flat_keys(_mathematics(config)) for config in (before, after))
    return [(key, old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)]


def _flat_keys(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        named = {"seed": "run.seed", "leases": "fabric.leases"}.get(key, key) if not prefix else f"{prefix}.{key}"
        flat |= _flat_keys(value, named) if isinstance(value, Mapping) else {named: value}
    return flat


def _mathematics(config: Config) -> dict[str, Any]:
    """Return the keys that `config_hash` is of."""
    values = msgspec.to_builtins(config)
    kept: dict[str, Any] = {
        "seed": config.run.seed,
        "model": values["model"],
        "data": values["data"],
        "train": values["train"],
        "optimizer": values["optimizer"],
        "outer": values["outer"],
    }
    del (
        kept["data"]["delivery"],
        kept["data"]["max_epochs"],
        kept["train"]["rounds"],
        kept["train"]["target_minutes"],
        kept["model"]["smaller"],
        kept["train"]["micro_batches"],
        kept["train"]["remat"],
    )
    if config.data.sampling == "random":  # the keys' meaning before there were others
        del kept["data"]["sampling"]
    if not config.data.has_pairs:
        del kept["data"]["dpo_beta"]
    for key in ("columns", "packing"):
        if not kept["data"][key]:  # runs on tokens keep their hash
            del kept["data"][key]
    if config.data.sampling != "fifo" or not config.data.shuffle_leases:
        del kept["data"]["shuffle_leases"]
    for one in (kept["data"], *kept["data"]["sources"]):
        if not one["format"]:  # decided by the files, as before there was this key
            del one["format"]
        else:
            one["format"] = re.split(r"[/\\]", one["format"])[-1]
    if not config.model.freeze:  # runs without frozen parameters keep their hash
        del kept["model"]["freeze"]
    if config.adapter.rank:
        kept["adapter"] = values["adapter"] | {"start": re.split(r"[/\\]", config.adapter.start)[-1]}
    if config.outer.weights == "tokens":
        del kept["outer"]["weights"]
    if config.outer.optimizer == "nesterov":
        del kept["outer"]["optimizer"]
    model, data = kept["model"], kept["data"]
    for table, key in ((model, "source"), (model, "weights"), (data, "source"), (data, "tokenizer")):
        if "://" not in table[key]:
            table[key] = re.split(r"[/\\]", table[key])[-1]
    if config.sync.topology != SyncConfig().topology:  # a ring's sums are rounded in another way
        kept["sync"] = {"topology": config.sync.topology, "precision": config.sync.precision}
        if config.sync.ring_compression != "none":
            kept["sync"]["ring_compression"] = config.sync.ring_compression
    if config.sync.overlap != "none":
        kept.setdefault("sync", {})["overlap"] = config.sync.overlap
    if config.sync.overlap in ("streaming", "decoupled") or file_of(config.sync.overlap) is not None:
        kept["sync"] |= {key: values["sync"][key] for key in ("fragments", "delay", "mixing")}
    if config.fabric.leases != "equal":
        kept["leases"] = config.fabric.leases
    for key in ("compression", "broadcast_compression", "start_compression"):
        if (codec := getattr(config.sync, key)) != "none":
            kept.setdefault("sync", {})[key] = codec
    for name, kind in config.kinds.items():
        if mathematics := kind.mathematics():
            kept[name] = mathematics
    for section, key in extension_keys(config.kinds):  # file name without folders; a resume compares the text
        if key in kept.get(section, {}):
            kept[section][key] = re.split(r"[/\\]", kept[section][key])[-1]
    return kept
