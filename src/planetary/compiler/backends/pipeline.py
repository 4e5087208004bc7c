"""Version of the compilation pipeline, readable without loading a compiler: part of every cache key."""

from __future__ import annotations

import importlib.metadata

PIPELINE_VERSION = 20  # raise when `rewrites` for IREE or the flags of a target change

LATEST_CHOICE = "latest choice of flags"  # the key of it: artifacts of another choice may be made anew


def compiler_version() -> str:
    """Return the version of IREE's compiler, e.g. `"3.13.0"`; "" without it: PJRT workers need none."""
    try:
        return importlib.metadata.version("iree-base-compiler")
    except importlib.metadata.PackageNotFoundError:
        return ""
