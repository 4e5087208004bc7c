"""Whether this machine has a Vulkan device; Mesa's lavapipe (Debian: mesa-vulkan-drivers) is one on any CPU."""

from __future__ import annotations

import functools


@functools.cache
def missing_vulkan() -> str:
    """Return why nothing can run on Vulkan here; "" if it can."""
    import iree.runtime as iree

    try:
        devices = iree.get_driver("vulkan").query_available_devices()
    except (RuntimeError, ValueError) as error:
        return f"IREE cannot open Vulkan: {str(error).splitlines()[0]}"
    return "" if devices else "no Vulkan device (on Debian, mesa-vulkan-drivers gives one that runs on the CPU)"


def known_to_be_wrong(device_name: str) -> bool:
    """Whether a Vulkan driver of this name is known to compute training steps wrongly.

    Mesa 22.3.6 (Debian 12; LLVM 15) does, on CPUs with AVX-512 at least: the tiny NanoChat step has the right loss and
    a gradient norm of 8,000 instead of 0.7 that changes from run to run. Workers find that out by themselves, and
    tests that need right numbers have to be skipped there; on any other driver they fail.
    """
    return "llvmpipe (LLVM 15." in device_name
