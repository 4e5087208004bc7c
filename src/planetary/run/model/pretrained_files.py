"""The small files of the pretrained folder and of the tokenizer a run started from, kept in the run's folder.

Settings of the tokenizer, chat templates, generation settings and unknown keys of the configuration belong to the
trained model as well. They are copied when the run starts, because the folder may change or vanish before the export.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from planetary.artifacts.store import write_atomically
from planetary.core.configuration.pretrained import TOKENIZER_FILE, is_pretrained
from planetary.core.configuration.schema import BUILT_IN_TOKENIZERS, Config
from planetary.core.configuration.weight_file import FILE_ENTRY, pretrained_folder
from planetary.core.errors import ResourceError
from planetary.data.tokenizer_settings import (
    ADDED_TOKENS_FILE,
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
)
from planetary.fleet.gateway.run_files import PRETRAINED

GENERATION_CONFIG_FILE = "generation_config.json"
TEMPLATES = "additional_chat_templates"  # folder with more templates, by name
_OF_TOKENIZERS = frozenset(
    {
        *(TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, TEMPLATE_FILE, "chat_template.json"),
        *(ADDED_TOKENS_FILE, "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
        *("sentencepiece.bpe.model", "tekken.json", "preprocessor_config.json", "processor_config.json"),
    }
)
CARD_FILE = "readme.md"  # the model card, in any case of letters
COMPANIONS = _OF_TOKENIZERS | {GENERATION_CONFIG_FILE}
"""Files that decide how the model beside them is used."""
_WEIGHTS = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".npz", ".npy", ".ckpt"}
)
_LARGEST = 256 << 20  # bytes of a file that is kept: a tokenizer of a large vocabulary has 40 MB


def keep_files(config: Config, run: Path) -> None:
    """Copy the files into a run's folder, unless it has them.

    Raises:
        ResourceError: they cannot be copied.
    """
    place = run / PRETRAINED
    files = source_files(config)
    if place.exists() or not files:
        return
    temporary = place.with_name(f".{PRETRAINED}.{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        for name, path in files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(temporary / name, path.read_bytes())
        temporary.rename(place)
    except OSError as error:
        raise ResourceError(f"keeping the files of {config.model.weights or config.data.tokenizer}: {error}") from error


def kept_files(config: Config, run: Path) -> dict[str, Path]:
    """Return the files by their names: those of the run's folder, or of the source if a run kept none."""
    place = run / PRETRAINED
    if not place.is_dir():
        return source_files(config)
    return {path.relative_to(place).as_posix(): path for path in sorted(place.rglob("*")) if path.is_file()}


def source_files(config: Config) -> dict[str, Path]:
    """Return the small files of the folders that `model.weights` and `data.tokenizer` name, by their names.

    Files of a tokenizer are those of the one the run uses, so none are there for bytes and characters.
    """
    folder, tokenizer = pretrained_folder(Path(config.model.weights or "/nowhere")), Path(config.data.tokenizer)
    is_own = config.data.tokenizer not in BUILT_IN_TOKENIZERS
    files: dict[str, Path] = _small_files(folder) if is_pretrained(folder) else {}
    if is_own and is_pretrained(folder) and tokenizer.absolute().parent == folder.absolute():
        return files
    files = {name: path for name, path in files.items() if not _is_of_tokenizer(name)}
    files.pop(GENERATION_CONFIG_FILE, None)  # it has ids of the other tokenizer
    if is_own and tokenizer.is_file():
        beside = {name: path for name, path in _small_files(tokenizer.parent).items() if _is_of_tokenizer(name)}
        with_settings = beside if TOKENIZER_CONFIG_FILE in beside else {}
        files |= {**with_settings, TOKENIZER_FILE: tokenizer}
    return files


def _is_of_tokenizer(name: str) -> bool:
    return name in _OF_TOKENIZERS or name.startswith(f"{TEMPLATES}/") or name.endswith((".tiktoken", ".jinja"))


def _small_files(folder: Path) -> dict[str, Path]:
    found = {path.name: path for path in folder.iterdir()}
    found |= {f"{TEMPLATES}/{path.name}": path for path in (folder / TEMPLATES).glob("*.jinja")}
    return {
        name: path
        for name, path in sorted(found.items())
        if path.is_file()
        and path.suffix.lower() not in _WEIGHTS
        and name != FILE_ENTRY
        and not name.startswith(".")
        and not name.endswith(".index.json")
        and path.stat().st_size <= _LARGEST
    }
