"""The kinds of run, siblings above the fleet, with the same files as far as each needs them: `docs/architecture.md`."""

from __future__ import annotations

from collections.abc import Mapping

SECTIONS: Mapping[str, str] = {
    "moe": "planetary.runs.mixture.config:MoeConfig",
    "serve": "planetary.runs.serve.config:ServeConfig",
    "federation": "planetary.runs.federation.config:FederationConfig",
    "rl": "planetary.runs.rl.config:RlConfig",
}
"""Name of a section -> where its struct is. Nothing is imported for it."""
