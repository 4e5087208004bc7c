"""What a site trained from one version, put on top of another: the displacement is kept, its beginning changes.

With θ_b the parameters that the displacement begins at, θ the newest ones and P the version that the site goes on from,

    θ' = P + (θ − θ_b)

In a merge in which the site contributes θ' its delta is then P − θ' = θ_b − θ, as if that had been trained from P. The
same is done with deltas that come late where rounds overlap (`docs/design/0012`).
"""

from __future__ import annotations

import numpy as np

from planetary.core.tensors import Tensors
from planetary.diloco.contributions import blocks


def rebase(version: Tensors, base: Tensors, newest: Tensors) -> dict[str, np.ndarray]:
    """Return `version` + (`newest` − `base`), computed in float64 and rounded once.

    Args:
        version: float32 masters by name, from which training goes on.
        base: float32, where the displacement begins.
        newest: float32, where it ends.
    """
    moved: dict[str, np.ndarray] = {}
    for name, start in version.items():
        result = np.empty(start.size, np.float32)
        flat, begins, ends = (array.reshape(-1) for array in (start, base[name], newest[name]))
        for block in blocks(start.size):
            result[block] = flat[block].astype(np.float64) + (ends[block].astype(np.float64) - begins[block])
        moved[name] = result.reshape(start.shape)
    return moved
