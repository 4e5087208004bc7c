"""A key that several structs have is one definition: the same type with its range, and the same default."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import inspect

from planetary.core.configuration.mixture_options import MixtureOptions
from planetary.core.configuration.schema import MoeConfig, OptimizerConfig, TrainConfig
from planetary.core.configuration.step_options import ComputeOptions, StepOptions, UpdateOptions
from planetary.moe.methods.acceptance import Policy
from planetary.moe.methods.averaging import FragmentMergeRule
from planetary.moe.methods.surrogate import FitOptions
from planetary.moe.training.settings import MoeTraining


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


def test_a_step_has_the_two_groups_and_the_optimizers_name() -> None:
    assert set(fields(StepOptions)) == {*fields(ComputeOptions), *fields(UpdateOptions), "optimizer"}
    assert fields(StepOptions)["optimizer"] == fields(OptimizerConfig)["name"]


def test_the_methods_defaults_are_those_of_their_keys() -> None:
    keys, policy, rule = MoeConfig(), Policy(), FragmentMergeRule()
    for name in ("window", "norm_ratio", "spectral_ratio", "redundant", "audited"):
        assert getattr(policy, name) == getattr(keys, name)
    assert (rule.radial, rule.rate, rule.momentum) == (keys.radial, keys.outer_rate, keys.outer_momentum)
    assert FitOptions().steps == keys.fit_steps
