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
