"""The results of tracing a model of this package, kept for the next start by everything that decides them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from planetary.artifacts.store import BlobStore, digest_of
from planetary.core.errors import TrustError, UserError
from planetary.fleet.preparation.environment import PACKAGE, environment, is_installed

MODELS = "planetary.models."
"""Beginning of the sources whose traces are kept: code of others may read files while it is traced."""

_KEY = "traced for serving 1 "
_DECIDING = ("compiler", "core", "models", "runs/serve/program")
"""Parts of this package that decide a trace; their files count where it is not installed from a wheel."""


class KeptTraces:
    """Traces of one model's code in a store."""

    def __init__(self, store: BlobStore, source: str, options: Mapping[str, Any]) -> None:
        """`source` builds the model with `options`."""
        self._store, self._made_from = store, (source, options, environment(), _own_code())

    def get(self, asked: object, make: Callable[[], bytes]) -> bytes:
        """Return the bytes kept under `asked`, or those of `make`, which are then kept.

        `asked`: decides the bytes, together with the model's code; msgspec writes it.
        """
        key = _KEY + digest_of(msgspec.json.encode([self._made_from, asked], order="sorted"))
        known = self._store.resolve(key)
        if known is not None:
            with contextlib.suppress(TrustError, UserError):  # damaged or removed: made again
                return self._store.get(known)
        made = make()
        self._store.link(key, self._store.put(made))
        return made


def _own_code() -> str:
    """Return the digest of this package's deciding files; "" where its version stands for them."""
    if is_installed(PACKAGE):
        return ""
    found = hashlib.sha256()
    for path in sorted(path for part in _DECIDING for path in (PACKAGE / part).rglob("*.py")):
        found.update(f"{path.relative_to(PACKAGE)} {digest_of(path.read_bytes())}\n".encode())
    return found.hexdigest()
