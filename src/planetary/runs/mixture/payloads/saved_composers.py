"""A composer's shard as it was saved, put together from the payload store: state, and under offload the experts.

Under offload the experts are not in the state: expert workers improve them, and the newest version of every shard's and
layer's is a separate payload.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planetary.artifacts.payload_store import PayloadStore
from planetary.runs.mixture.payloads.experts import experts_from
from planetary.runs.mixture.payloads.shard import shard_from
from planetary.runs.mixture.plan import MixturePlan
from planetary.runs.mixture.training.participant_states import ComposerState


def saved_composer(store: PayloadStore, shard: str, experts: Sequence[str], plan: MixturePlan) -> ComposerState:
    """Return a composer's state with the experts in training form.

    Args:
        store: of the run.
        shard: payload of the saved state.
        experts: under offload, payloads of the experts, by layer.
        plan: of the mixture.

    Raises:
        PlanetaryError: a payload is missing, damaged or of another model.
    """
    state, _, _ = shard_from(store.get(shard), plan)
    if not experts:  # they are in the state
        return state
    held = [experts_from(store.get(name)) for name in experts]
    return msgspec.structs.replace(
        state,
        experts=tuple(one.weights for one in held),
        expert_moments=tuple(one.moments for one in held),
        residuals=tuple(one.residuals for one in held),
    )
