"""A key that several structs have is one definition: the same type with its range, and the same default."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Collection

import msgspec
import pytest
from msgspec import inspect

from planetary.cli.main import build_parser
from planetary.compiler.backends.targets import DEFAULT_NAMES
from planetary.core.configuration.key_meanings import meanings
from planetary.core.configuration.keys import FIELDS, SECTIONS
from planetary.core.configuration.ranges import describe
from planetary.core.configuration.schema import OptimizerConfig, TrainConfig
from planetary.core.configuration.step_options import ComputeOptions, StepOptions, UpdateOptions
from planetary.core.errors import UserError
from planetary.runs.mixture.config import MixtureOptions, MoeConfig
from planetary.runs.mixture.methods.acceptance import Policy
from planetary.runs.mixture.methods.pace import PACES
from planetary.runs.mixture.methods.surrogate import FitOptions
from planetary.runs.mixture.plan import keys_of
from planetary.runs.mixture.training.settings import MoeTraining
from planetary.runs.rl.objectives.objective import OBJECTIVES
from planetary.runs.rounds.controller.pace import SHARES

NAMED: list[tuple[str, Collection[str]]] = [
    ("fabric.leases", SHARES),
    ("moe.pace", PACES),
    ("rl.objective", OBJECTIVES),
    ("fabric.backend", {"auto", *DEFAULT_NAMES}),
]
"""Keys whose values are the names in a table of objects."""


@pytest.mark.parametrize(("key", "names"), NAMED)
def test_a_key_takes_the_names_of_its_table(key: str, names: Collection[str]) -> None:
    section, name = key.split(".")
    kind = FIELDS[section][name].type
    assert isinstance(kind, inspect.LiteralType)
    assert set(kind.values) == set(names)


@pytest.mark.parametrize(
    ("command", "given"),
    [
        (["serve", "model"], {"--batch": "serve.batch", "--cache-mb": "serve.cache_mb", "--weights": "serve.weights"}),
        (["worker", "--connect=h:1"], {"--threads": "fabric.threads", "--latency-budget": "fabric.latency_budget_s"}),
        (["gateway"], {"--host": "fabric.host", "--hub": "federation.hub"}),
        (["train"], {"--workers": "fabric.workers", "--rounds": "train.rounds"}),
    ],
)
def test_a_flag_of_a_key_has_its_meaning_range_and_default(command: list[str], given: dict[str, str]) -> None:
    parser = build_parser(command[0])
    taken = vars(parser.parse_args([*command]))
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:
        parser.parse_args([command[0], "--help"])
    words = " ".join(shown.getvalue().split())
    for flag, key in given.items():
        section, name = key.split(".")
        field = FIELDS[section][name]
        assert taken[flag[2:].replace("-", "_")] in (None, field.default)
        assert meanings(SECTIONS[section])[name] in words
        range_ = describe(field.type)
        if range_.startswith(("a whole", "a finite", "one of")):
            assert range_ in words
            with pytest.raises(UserError, match=f"^{flag}: {key}: expected {re.escape(range_)}, found '?-1"):
                parser.parse_args([*command, f"{flag}=-1"])


def fields(struct: type[msgspec.Struct]) -> dict[str, tuple[inspect.Type, object]]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return {field.name: (field.type, field.default) for field in info.fields}


@pytest.mark.parametrize(
    ("group", "having"),
    [
        (ComputeOptions, TrainConfig),
        (ComputeOptions, StepOptions),
        (UpdateOptions, OptimizerConfig),
        (UpdateOptions, StepOptions),
        (MixtureOptions, MoeConfig),
        (MixtureOptions, MoeTraining),
    ],
)
def test_a_group_of_keys_is_the_same_in_every_struct_that_has_it(
    group: type[msgspec.Struct], having: type[msgspec.Struct]
) -> None:
    found = fields(having)
    assert {name: found[name] for name in fields(group)} == fields(group)


OF_THE_DATA = {"marked_targets"}
"""Options of a step that no key has: the data decide them."""


def test_a_step_has_the_two_groups_the_optimizer_and_the_data() -> None:
    assert set(fields(StepOptions)) == {*fields(ComputeOptions), *fields(UpdateOptions), "optimizer", *OF_THE_DATA}
    assert fields(StepOptions)["optimizer"] == fields(OptimizerConfig)["name"]


OBJECTS = {
    **{name: (Policy, name) for name in ("window", "norm_ratio", "spectral_ratio", "redundant", "audited")},
    "fit_steps": (FitOptions, "steps"),
}
"""Keys of `[moe]` that an object of the training or of the syncer has, and the object's field."""

# The cadence has the report's defaults, the keys have ours (docs/design/mixtures.md).
HORIZONS = {"router_every", "latent_every", "backbone_every", "backbone_fragments", "refresh_every"}
OF_THE_RUN = {"expert_workers", "ownership", "sketches", "pace", "store"}


def test_each_mixture_key_has_one_place_and_its_default() -> None:
    """Every key of a mixture has one place and its object has the key's default."""
    keys = fields(MoeConfig)
    assert set(keys) == {*fields(MixtureOptions), *OBJECTS, *HORIZONS, *OF_THE_RUN}
    assert len(keys) == len(fields(MixtureOptions)) + len(OBJECTS) + len(HORIZONS) + len(OF_THE_RUN)
    for key, (struct, name) in OBJECTS.items():
        assert fields(struct)[name][1] == keys[key][1], key


def test_a_training_takes_every_key_of_its_objects() -> None:
    other = {"window": 3, "norm_ratio": 0.5, "spectral_ratio": 0.25, "redundant": 0.125, "audited": 0.75}
    assert keys_of(MoeConfig(**other), Policy) == other
    assert keys_of(MoeConfig(composers=3), MixtureOptions).keys() == fields(MixtureOptions).keys()
