"""A key that a kind of run does not honour is refused when it is given."""

from __future__ import annotations

import pytest

from planetary.core.config import config_from_tables
from planetary.core.errors import UserError
from planetary.run.kinds import kind_of

KINDS = {
    "serving": {"serve": {"model": "runs/x"}},
    "mixture": {"moe": {"composers": 2}, "model": {"source": "planetary.models.latent_moe:build"}},
    "reinforcement": {"rl": {"task": "reverse"}},
}
GIVEN = {
    "sync.topology=ring": KINDS,
    "sync.compression=int8": KINDS,
    "sync.connections=4": KINDS,
    "fabric.leases=measured": ("serving", "reinforcement"),
    "fabric.round_deadline_s=9": KINDS,
    "train.inner_state=reset": ("serving", "mixture"),
    "outer.judge=none": ("serving", "reinforcement"),
    "federation.every_rounds=3": KINDS,
    "data.source=other.txt": ("reinforcement",),
    "eval.batches=3": ("serving", "reinforcement"),
}


@pytest.mark.parametrize(("override", "kind"), [(one, kind) for one, kinds in GIVEN.items() for kind in kinds])
def test_ignored_key_is_refused_with_its_reason(override: str, kind: str) -> None:
    config = config_from_tables(KINDS[kind], [override])
    assert kind_of(config).name == kind
    with pytest.raises(UserError, match=rf"{kind!r} does not honour .*{override.partition('=')[0]}: \w+"):
        kind_of(config).check(config)


@pytest.mark.parametrize("override", ["train.rounds=3", "fabric.workers=1", "eval.every=2", "data.tokenizer=byte"])
def test_honoured_key_and_default_are_accepted(override: str) -> None:
    config = config_from_tables(KINDS["reinforcement"], [override, "sync.compression=none", "fabric.leases=equal"])
    kind_of(config).check(config)


def test_rounds_honour_every_key() -> None:
    config = config_from_tables({}, ["sync.compression=int8", "fabric.leases=measured", "train.inner_state=reset"])
    assert kind_of(config).check(config) == []
