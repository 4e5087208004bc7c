"""How far a compiled step may be from the reference, where rounding decides more than the last digit."""

from __future__ import annotations

import numpy as np
import pytest
from step_runs import mlp_model, mlp_params

from planetary.compiler import build_train_step
from planetary.compiler.precision import coarsest_factor
from planetary.compiler.step_options import StepOptions
from planetary.compiler.verify import compare, make_trial, run_expected
from planetary.core.deviations import ROUNDING


def _results(options: StepOptions) -> tuple:
    step = build_train_step(mlp_model(), options)
    trial = make_trial(step.spec, mlp_params(), {})
    return step, trial, run_expected(step, trial)


def test_a_sign_may_flip_in_few_places_and_its_momentum_in_none() -> None:
    step, trial, good = _results(StepOptions(optimizer="lion"))
    rounding = ROUNDING["bf16"]  # accepts 1.5% of the elements, which of 196 are 3
    for flips, accepted in ((3, True), (4, False)):
        flipped = good["cube"].copy()
        flipped.reshape(-1)[:flips] += 2 * 2.0**-7
        error = compare(step.spec, trial, good, good | {"cube": flipped}, rounding)[1]
        assert (error <= 1) is accepted
    assert compare(step.spec, trial, good, good | {"cube": flipped})[1] > 1
    mean = good["lion.mean.cube"].copy()
    mean.reshape(-1)[0] *= 2
    assert compare(step.spec, trial, good, good | {"lion.mean.cube": mean}, rounding)[0] == "lion.mean.cube"
    broken = good["cube"].copy()
    broken.reshape(-1)[0] = np.nan
    assert compare(step.spec, trial, good, good | {"cube": broken}, rounding) == ("cube", np.inf)


@pytest.mark.parametrize("precision", ["f32", "bf16", "f16"])
def test_tolerance_follows_the_factors(precision: str) -> None:
    step, trial, good = _results(StepOptions(precision=precision))
    assert coarsest_factor(step.portable) == precision
    off = good | {"grad_norm": good["grad_norm"] * np.float32(1.01)}
    error = compare(step.spec, trial, good, off, ROUNDING[precision])[1]
    assert (error <= 1) is (precision == "bf16")
