"""Weights of a merge in which some contributions may not have more than a given share."""

from __future__ import annotations

from collections.abc import Mapping


def capped(tokens: Mapping[str, int], most_share: Mapping[str, float]) -> dict[str, int]:
    """Return the weight of each contributor: its tokens, or what gives it exactly its largest share.

    Those above their share are lowered until none is; the others' weights among each other stay as their tokens are.
    Where the caps of all contributors sum to less than 1 they cannot all hold, and one that contributes alone has the
    whole weight: then the shares are in proportion to the caps.

    Args:
        tokens: by contributor, each at least 1.
        most_share: in (0, 1], by contributor; those that are missing have 1.
    """
    caps = {name: most_share.get(name, 1.0) for name in tokens}
    if all(count <= caps[name] * sum(tokens.values()) for name, count in tokens.items()):
        return dict(tokens)
    scale = sum(tokens.values())
    if sum(caps.values()) <= 1.0:
        return {name: max(1, round(cap * scale)) for name, cap in caps.items()}
    lowered: set[str] = set()
    while True:
        free = sum(count for name, count in tokens.items() if name not in lowered)
        left = 1.0 - sum(caps[name] for name in lowered)
        kept = tokens.keys() - lowered
        over = {name for name in kept if tokens[name] * left > caps[name] * free * (1 + 1e-12)}
        if not over:
            break
        lowered |= over
    return {name: max(1, int(caps[name] / left * free)) if name in lowered else count for name, count in tokens.items()}
