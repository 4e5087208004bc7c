"""Keys of PCP's `gateway.json` (github.com/deltawave-tech/pcp) that nothing here corresponds to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

_GRAPH = "there is no knowledge graph here"
NO_EFFECT: Mapping[str, str] = {
    "graph_backend": _GRAPH,
    "policy_store_path": _GRAPH,
    "neo4j": _GRAPH,
    "sharing_defaults": _GRAPH,
    "custom_extensions": "extensions are Python packages here",
    "internal_api_token_env": "controllers are parts of this process and need no token for each other",
    "api.internal_token_env": "controllers are parts of this process and need no token for each other",
    "global_controller_endpoint": "the hub is federation.upstream",
    "federation_hub_endpoint": "the hub is federation.upstream",
    "federation.heartbeat_interval_ms": "the hub decides how often a site gives a sign of life",
    "controllers.*.api": "controllers answer on the gateway's own port",
    "controllers.*.no_dashboard": "the dashboard is a page of the gateway's own port",
    "controllers.*.backend": "workers say which backend they have",
}
"""Key -> why it has no effect."""
_SAME_HERE: Mapping[str, Any] = {
    "graph_backend": "memory",
    "federation.heartbeat_interval_ms": 5000,
    "controllers.*.no_dashboard": True,
}


def without_pcp(tables: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the tables of a gateway's file without PCP's keys that have no effect, which one warning names.

    `api_token_env` becomes `api.token_env`, unless that is there.
    """
    kept = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tables.items()}
    if isinstance(controllers := kept.get("controllers"), dict):
        kept["controllers"] = {
            name: dict(one) if isinstance(one, Mapping) else one for name, one in controllers.items()
        }
    reasons: dict[str, list[str]] = {}
    for key, why in NO_EFFECT.items():
        section, _, name = key.rpartition(".")
        for place in _places(kept, section):
            value = place.pop(name, None)
            if value is not None and value != _SAME_HERE.get(key) and key not in reasons.get(why, ()):
                reasons.setdefault(why, []).append(key)
    if (token := kept.pop("api_token_env", None)) is not None and isinstance(kept.setdefault("api", {}), dict):
        kept["api"].setdefault("token_env", token)
    if reasons:
        log.warning(
            "%s: no effect: %s", origin, "; ".join(f"{', '.join(keys)} ({why})" for why, keys in reasons.items())
        )
    return kept


def _places(tables: dict[str, Any], section: str) -> list[dict[str, Any]]:
    if not section:
        return [tables]
    if section == "controllers.*":
        controllers = tables.get("controllers")
        found = controllers.values() if isinstance(controllers, dict) else ()
    else:
        found = [tables.get(section)]
    return [one for one in found if isinstance(one, dict)]
