"""A key that a kind of run honours is read by code of this kind, for more than a check, a hash or a display."""

from __future__ import annotations

import pytest
from key_readers import Place, keys_read_by, reached
from test_honoured_keys import ABSENT, CASES, config_of

from planetary.core.configuration.keys import all_keys, extension_keys
from planetary.core.extension_points import EXTENSION_POINTS
from planetary.run.kinds import kind_of

AT_THE_START: list[Place] = [
    ("planetary.run.choice", "new_run"),
    ("planetary.fleet.gateway.gateway", "Gateway"),
    ("planetary.run.processes.local_run", "check_backend"),
    ("planetary.run.processes.local_run", "threads_of"),
    ("planetary.run.processes.local_run", "node_start"),
    ("planetary.cli.commands.roles.gateway", "_run_started"),
    ("planetary.site.hosted_run", "HostedRun"),
]
"""Code that starts a run of any kind, and hands its keys to other processes."""
STARTS: dict[str, list[Place]] = {
    "rounds": [
        ("planetary.runs.rounds.gateway.gateway", "RoundsSetup"),
        ("planetary.runs.rounds.worker.role", "TrainingLoader"),
    ],
    "hub": [
        ("planetary.runs.federation.hub.gateway", "HubSetup"),
        ("planetary.runs.rounds.gateway.gateway", "RoundsSetup"),
    ],
    "site": [
        ("planetary.runs.federation.site.gateway", "SiteSetup"),
        ("planetary.runs.rounds.worker.role", "TrainingLoader"),
        ("planetary.run.kind.federation", "SiteRounds"),
    ],
    "serving": [("planetary.runs.serve.gateway", "ServingSetup"), ("planetary.run.model.served", "load_served")],
    "mixture": [
        ("planetary.runs.mixture.gateway.gateway", "MixtureSetup"),
        ("planetary.runs.mixture.loader", "MixtureLoader"),
    ],
    "reinforcement": [
        ("planetary.runs.rl.gateway", "PolicySetup"),
        ("planetary.runs.rl.preparation", "prepare_policy"),
        ("planetary.run.model.served", "new_model"),
    ],
}
"""Name of a kind -> its gateway, its preparation and its workers' roles."""
NO_EFFECT = [
    "planetary.core",  # reads, checks and hashes keys
    "planetary.monitor",
    "planetary.run.kinds:KINDS",  # the other kinds
    "planetary.run.kinds:kind_of",
    "planetary.site.site",  # other runs
    "planetary.runs.rounds.preparation.prepared_steps:sources_of",
    "planetary.runs.rounds.preparation.prepared_steps:find_record",
]
"""Code that compares, hashes or shows keys."""
NOT_OF: dict[str, list[str]] = {
    "star": [
        "planetary.runs.rounds.gateway.topology:RingGateway",
        "planetary.runs.rounds.gateway.topology:ring_policy",
        "planetary.runs.rounds.controller.ring",
    ],
    "ring": ["planetary.runs.rounds.preparation.parameters", "planetary.runs.rounds.controller.star"],
}
"""Code of a kind that a case of it does not run."""


def keys_of_objects(named: str) -> set[str]:
    """Return the keys that the objects which a key names declare as theirs: `outer.momentum` of an outer optimizer."""
    section, _, name = named.partition(".")
    point = extension_keys([]).get((section, name))
    objects = EXTENSION_POINTS[point.kind].built_in.values() if point is not None else ()
    return {f"{section}.{key}" for one in objects for key in getattr(one, "keys", ())}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_honoured_key_is_read_by_the_kind(case: str) -> None:
    config = config_of(case)
    kind = kind_of(config)
    keys = kind.keys(config)
    found = reached(STARTS[kind.name], [*NO_EFFECT, *NOT_OF.get(case, [])])
    read = keys_read_by([*AT_THE_START, *found])
    read |= {key for named in read for key in keys_of_objects(named)}
    honoured = {key for key in all_keys() if not keys.why_not(key, ABSENT)} - {*keys.passed_on, "sinks"}
    assert sorted(honoured - read) == []
