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

READERS: Mapping[str, str] = {
    "rounds": "planetary.runs.rounds.status:READER",
    "hub": "planetary.runs.federation.status:HUB_READER",
    "site": "planetary.runs.federation.status:SITE_READER",
    "mixture": "planetary.runs.mixture.status:READER",
    "serving": "planetary.runs.serve.status:READER",
    "reinforcement": "planetary.runs.rl.status:READER",
    "placement": "planetary.site.placement.status:VIEW",
}
"""Name of a kind of run -> where the reader of its files is. A hub that places jobs has a status alone.

Nothing is imported for the table.
"""
