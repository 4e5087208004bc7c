"""The interfaces of the extension points, for files and packages of users; see `docs/extending.md`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planetary.lazy_names import lazy_names

if TYPE_CHECKING:
    from planetary.core.errors import ProtocolError
    from planetary.core.tensors import TensorSpec
    from planetary.sync.codecs.tensor_codec import Codec, check_finite

_HOMES = {
    "Codec": "planetary.sync.codecs.tensor_codec",
    "ProtocolError": "planetary.core.errors",
    "TensorSpec": "planetary.core.tensors",
    "check_finite": "planetary.sync.codecs.tensor_codec",
}

__all__ = ["Codec", "ProtocolError", "TensorSpec", "check_finite"]

__getattr__ = lazy_names(globals(), _HOMES)
