"""The extension points: one registry for each kind of object a configuration names. See `docs/extending.md`.

A kind's interface and classes are in the package that uses them; here they are named only, and imported by the first
look-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planetary.core.registry import Registry

CODECS: Registry[Any] = Registry(
    "codec",
    "planetary.codecs",
    "planetary.sync.codecs.tensor_codec:Codec",
    ["planetary.sync.codecs.*"],
    but=["kernels"],
)

EXTENSION_POINTS: Mapping[str, Registry[Any]] = {"codec": CODECS}
"""By the kind a key of the configuration declares."""
