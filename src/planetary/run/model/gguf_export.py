"""A run's model as a GGUF file, for llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planetary.artifacts.gguf.families import ROPE_FACTORS, family_of_type, llama3_factors
from planetary.artifacts.gguf.tokenizer import tokenizer_metadata
from planetary.artifacts.gguf.weight_file import GgufFile
from planetary.artifacts.gguf.writer import gguf_pieces
from planetary.artifacts.store import write_atomically
from planetary.core.errors import UserError
from planetary.data.tokenizer_settings import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, read_settings, read_template
from planetary.run.model.pretrained_export import PretrainedExport, PublishedModel, trained_published


def export_gguf(
    run: Path, file: Path, *, kind: str = "f16", checkpoint: Path | None = None, force: bool = False
) -> PretrainedExport:
    """Write a run's trained model into a GGUF file.

    Args:
        run: the run's folder.
        file: ends with `.gguf`.
        kind: element type of the matrices, `f16` or `q8_0`.
        checkpoint: a checkpoint's folder instead of the newest one's.
        force: replace the file.

    Raises:
        UserError: there is no run, no checkpoint, or GGUF has no place for the model or the tokenizer; `file` is there.
        TrustError: the checkpoint is damaged.
    """
    if file.suffix.lower() != GgufFile.suffix:
        raise UserError(f"cannot export to {file}: expected the name of a file that ends with {GgufFile.suffix}")
    if file.exists() and not force:
        raise UserError(f"cannot export to {file}: it is there; use another, or replace it (--force, force=True)")
    model = trained_published(run, checkpoint, whole=True)
    family = family_of_type(model.family.name)
    published = model.published
    tensors = {
        family.name_in_file(name): family.own_values(name, value, published, back=True)
        for name, value in model.tensors.items()
    }
    scaling = published.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        tensors[ROPE_FACTORS] = llama3_factors(scaling, published["head_dim"], published["rope_theta"])
    metadata = {
        **family.metadata(published),
        "general.name": published.get("name") or run.resolve().name,
        **({"general.license": published["license"]} if isinstance(published.get("license"), str) else {}),
        **_tokenizer(model),
    }
    write_atomically(file, gguf_pieces(metadata, tensors, kind))
    return PretrainedExport(
        folder=file,
        architecture=family.architecture,
        round=model.round,
        param_count=sum(value.size for value in model.tensors.values()),
    )


def _tokenizer(model: PublishedModel) -> dict[str, Any]:
    """Return the metadata of tokenizer, special tokens and chat template."""
    whole = model.tokenizer_json()
    if whole is None:
        raise UserError(f"a GGUF file has a tokenizer, and this run has none: {model.no_tokenizer}")
    found = tokenizer_metadata(json.loads(whole), model.published["vocab_size"])
    ids = {name: model.published.get(f"{name}_token_id") for name in ("bos", "eos", "pad")}
    ends = ids["eos"] if isinstance(ids["eos"], list) else [ids["eos"]]
    numbers = dict(zip(("eos", "eot"), ends, strict=False)) | {"bos": ids["bos"], "padding": ids["pad"]}
    if TOKENIZER_CONFIG_FILE in model.kept:
        names = dict(read_settings(model.kept[TOKENIZER_CONFIG_FILE].parent).names)
        tokens = found["tokenizer.ggml.tokens"]
        numbers["unknown"] = tokens.index(names["unk_token"]) if names.get("unk_token") in tokens else None
    found |= {f"tokenizer.ggml.{name}_token_id": value for name, value in numbers.items() if value is not None}
    settings = next((model.kept[name] for name in (TEMPLATE_FILE, TOKENIZER_CONFIG_FILE) if name in model.kept), None)
    template = read_template(settings.parent) if settings is not None else ""
    return {**found, "tokenizer.chat_template": template} if template else found
