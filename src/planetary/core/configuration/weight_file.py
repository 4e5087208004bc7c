"""Pretrained models that are one file: the format of a file is found by its ending.

Such a file stands for a folder in the cache with the small files of a published one (`config.json`, the tokenizer).
The tensors stay where they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from planetary.core.errors import ResourceError, TrustError, UserError
from planetary.core.extension_points import WEIGHT_FILES
from planetary.core.places import cache_folder

FILE_ENTRY = "weight_file"
"""Name of the folder's file with the path of the tensors."""
_REVISION = 2  # version of the folder's content


class WeightFile(ABC):
    """A format of files with a whole pretrained model.

    Attributes:
        name: in the registry, and of the folder in the cache.
        suffix: ending of its files, in small letters.
    """

    name: ClassVar[str]
    suffix: ClassVar[str]

    @abstractmethod
    def small_files(self, path: Path) -> Mapping[str, Any]:
        """Return the published folder's other files by name: texts, or values to write as JSON.

        Among them is `config.json`, of a family that is known here.

        Raises:
            UserError: the model or its tokenizer is not known here.
            TrustError: the file is damaged.
        """

    @abstractmethod
    def tensors(self, path: Path) -> dict[str, np.ndarray]:
        """Return the tensors, float32, under the published folder's names. Raises as `small_files`."""


def weight_file(path: Path) -> WeightFile | None:
    """Return the format of a file; None: it is no file, or of no format that is known here."""
    suffix = path.suffix.lower()
    if not suffix or not path.is_file():
        return None
    found = (WEIGHT_FILES.find(name) for name in WEIGHT_FILES.names())
    return next((one() for one in found if one.suffix == suffix), None)


def pretrained_folder(path: Path) -> Path:
    """Return the folder of a pretrained model: `path`, or that of a weight file, made where it is not there.

    Raises:
        UserError: the file cannot be read, or has a model or a tokenizer that is not known here.
        ResourceError: the cache cannot be written.
    """
    kind = weight_file(path)
    if kind is None:
        return path
    stat = path.stat()
    named = f"{path.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{_REVISION}"
    folder = cache_folder(None) / kind.name / hashlib.sha256(named.encode()).hexdigest()[:16]
    if (folder / "config.json").is_file():
        return folder
    try:
        files = {FILE_ENTRY: str(path.absolute()), **kind.small_files(path)}
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
    """Return the weight file that a folder of the cache stands for; None: it is none of these."""
    entry = folder / FILE_ENTRY
    return Path(entry.read_text(encoding="utf-8")) if entry.is_file() else None
