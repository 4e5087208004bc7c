"""The label of a compiled artifact, readable before anything in it is loaded.

The label is one line of JSON baked into the module as reflection text. It is found by searching the bytes,
so a worker can refuse an artifact of another compiler version or another CPU without handing it to the
loader.
"""

from __future__ import annotations

import re

import msgspec

from planetary.core import decoding
from planetary.core.errors import TrustError
from planetary.core.tensors import WeightBlocks

_MARK = "planetary-artifact"
_PATTERN = re.compile(rb"planetary-artifact (\{[^\x00]*?\})\x00")


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """A call of a compiled function, as a part of another. Values have numbers: the arguments of the whole, then the
    results of one stage after the other.
    """

    function: str
    arguments: tuple[int, ...]
    results: int  # number of results
    released: tuple[int, ...]  # values that nothing after this stage needs


class StagedFunction(msgspec.Struct, frozen=True, array_like=True):
    """A function that was compiled as several, called in order."""

    name: str
    stages: tuple[Stage, ...]
    results: tuple[int, ...]


class ArtifactLabel(msgspec.Struct, frozen=True):
    """Source, compiler and target of a compiled module."""

    iree: str  # version of the compiler
    backend: str  # "cpu", "cuda", "hip", "vulkan", "metal"
    target: str  # e.g. "host", "baseline", "sm_80"
    features: str  # identifies the CPU a "host" module was tuned for
    stablehlo: str  # sha256 of the portable artifact of the training step
    blocks: tuple[WeightBlocks, ...] = ()  # layouts of the functions' arguments in blocks
    staged: tuple[StagedFunction, ...] = ()

    def encode(self) -> str:
        """Return the text to bake in."""
        return f"{_MARK} {msgspec.json.encode(self).decode()}"


def read_label(vmfb: bytes | memoryview) -> ArtifactLabel:
    """Return the label of a compiled module.

    Raises:
        TrustError: there is none, or it is not readable: the file was not made by planetary.
    """
    found = _PATTERN.search(vmfb)
    if found is None:
        raise TrustError("the compiled module carries no planetary label; it was not made by `compile_artifact`")
    try:
        return decoding.from_json(found.group(1), ArtifactLabel)
    except msgspec.DecodeError as error:
        raise TrustError(f"the compiled module's label is damaged: {error}") from error
