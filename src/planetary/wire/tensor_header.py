"""The Cap'n Proto header of a tensor frame (`tensor.capnp`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import capnp as _capnp

from planetary.core.errors import RemoteProtocolError

capnp: Any = _capnp  # it has no types for what it defines in C
# pycapnp hooks the import statement to find *.capnp files anywhere on the path. The hook is not wanted here.
capnp.remove_import_hook()
_SCHEMA: Any = capnp.load(str(Path(__file__).with_name("tensor.capnp")))
_TensorHeader: Any = _SCHEMA.TensorHeader


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Where a run of tensor bytes belongs."""

    message: int  # id of the message that declared the tensor
    tensor: int  # position in its declaration
    offset: int  # first byte of the run


def encode_tensor_header(header: TensorHeader) -> bytes:
    """Return the header as one Cap'n Proto message."""
    return _TensorHeader.new_message(message=header.message, tensor=header.tensor, offset=header.offset).to_bytes()


def decode_tensor_header(data: bytes) -> TensorHeader:
    """Read a header; every malformation raises `RemoteProtocolError`."""
    try:
        with _TensorHeader.from_bytes(data) as reader:
            return TensorHeader(message=reader.message, tensor=reader.tensor, offset=reader.offset)
    except (capnp.KjException, ValueError, OverflowError, MemoryError) as error:
        # KjException's text spans lines and has a native stack; its first line says what is wrong.
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise RemoteProtocolError(f"reading a tensor frame: its header is malformed: {first_line}") from None
