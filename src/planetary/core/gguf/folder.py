"""A GGUF file as a folder of a pretrained model: small files in the cache, and the tensors where they are."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from planetary.core.errors import ResourceError, TrustError, UserError
from planetary.core.gguf.blocks import read_tensor
from planetary.core.gguf.families import ROPE_FACTORS, family_of_file, llama3_scaling
from planetary.core.gguf.header import GgufHeader, read_header
from planetary.core.gguf.tokenizer import tokenizer_files
from planetary.core.places import cache_folder

SUFFIX = ".gguf"
FILE_ENTRY = "gguf_file"
"""Name of the folder's file with the path of the tensors."""
_REVISION = 1  # version of the folder's content


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file."""
    return path.suffix.lower() == SUFFIX and path.is_file()


def pretrained_folder(path: Path) -> Path:
    """Return the folder of a pretrained model: `path`, or that of a GGUF file, made where it is not there.

    Raises:
        UserError: the file cannot be read, or has a model or a tokenizer that is not known here.
        ResourceError: the cache cannot be written.
    """
    if not is_gguf(path):
        return path
    stat = path.stat()
    named = f"{path.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{_REVISION}"
    folder = cache_folder(None) / "gguf" / hashlib.sha256(named.encode()).hexdigest()[:16]
    if (folder / "config.json").is_file():
        return folder
    try:
        header = read_header(path)
        files = _files(header)
    except (UserError, TrustError) as error:
        raise UserError(f"cannot take the model of {path}: {error}") from None
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=1)
            (temporary / name).write_text(text, encoding="utf-8")
        if folder.exists():  # made beside this
            shutil.rmtree(temporary)
        else:
            temporary.rename(folder)
    except OSError as error:
        raise ResourceError(f"cannot write {folder}: {error.strerror or error}") from error
    return folder


def file_of_folder(folder: Path) -> Path | None:
    """Return the GGUF file that a folder of the cache stands for; None: it is none of these."""
    entry = folder / FILE_ENTRY
    return Path(entry.read_text(encoding="utf-8")) if entry.is_file() else None


def _files(header: GgufHeader) -> dict[str, Any]:
    family = family_of_file(header.architecture)
    published = family.published(header.metadata, {name: one.shape for name, one in header.tensors.items()})
    if factors := header.tensors.get(ROPE_FACTORS):
        published["rope_scaling"] = llama3_scaling(read_tensor(header.path, factors), published)
    for key, name in (("general.license", "license"), ("general.name", "name")):
        if isinstance(header.metadata.get(key), str):
            published[name] = header.metadata[key]
    ids = {name: published[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        FILE_ENTRY: str(header.path.absolute()),
        **tokenizer_files(header.metadata),
        "generation_config.json": {name: value for name, value in ids.items() if value is not None},
        "config.json": published,
    }


def published_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return a GGUF file's tensors, float32, under the names of the published folders.

    Raises:
        UserError: as `pretrained_folder`.
        TrustError: the file is damaged.
    """
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
