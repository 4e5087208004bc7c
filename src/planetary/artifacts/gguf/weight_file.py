"""A GGUF file as a pretrained model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from planetary.artifacts.gguf.blocks import read_tensor
from planetary.artifacts.gguf.families import ROPE_FACTORS, family_of_file, llama3_scaling
from planetary.artifacts.gguf.header import read_header
from planetary.artifacts.gguf.tokenizer import tokenizer_files
from planetary.core.configuration.weight_file import WeightFile


class GgufFile(WeightFile):
    """A file of llama.cpp."""

    name = "gguf"
    suffix = ".gguf"

    def small_files(self, path: Path) -> Mapping[str, Any]:
        header = read_header(path)
        family = family_of_file(header.architecture)
        published = family.published(header.metadata, {name: one.shape for name, one in header.tensors.items()})
        if factors := header.tensors.get(ROPE_FACTORS):
            published["rope_scaling"] = llama3_scaling(read_tensor(header.path, factors), published)
        for key, name in (("general.license", "license"), ("general.name", "name")):
            if isinstance(header.metadata.get(key), str):
                published[name] = header.metadata[key]
        ids = {name: published[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return {
            **tokenizer_files(header.metadata),
            "generation_config.json": {name: value for name, value in ids.items() if value is not None},
            "config.json": published,
        }

    def tensors(self, path: Path) -> dict[str, np.ndarray]:
        header = read_header(path)
        family = family_of_file(header.architecture)
        found = {}
        for name, tensor in header.tensors.items():
            if name != ROPE_FACTORS:
                stored = family.stored_name(name)
                published = {
                    "num_attention_heads": header.metadata.get(f"{header.architecture}.attention.head_count"),
                    "num_key_value_heads": header.metadata.get(f"{header.architecture}.attention.head_count_kv"),
                }
                found[stored] = family.own_values(stored, read_tensor(path, tensor), published)
        return found
