"""Workers that take the outer step from relayed payloads have the gateway's bits, or notice that they have not."""

from __future__ import annotations

import numpy as np
import pytest

from planetary.core.configuration.schema import OuterConfig
from planetary.core.errors import LocalProtocolError, ProtocolError
from planetary.core.extension_points import MERGE_RULES
from planetary.core.registry import Chosen
from planetary.core.tensors import TensorSpec
from planetary.sync.contributions import Contribution
from planetary.sync.merge import Radial, rule_of
from planetary.sync.outer import OuterStep, initial_state, outer_step
from planetary.sync.outer_optimizers import Nesterov
from planetary.sync.payload import PayloadForm, payload_digest
from planetary.sync.relay import RelayedVersion, params_digest

SPECS = (TensorSpec("w", "f32", (70, 90)), TensorSpec("embed", "f32", (40,)), TensorSpec("none", "f32", (0, 3)))
START = {spec.name: np.linspace(-1, 1, spec.size, dtype=np.float32).reshape(spec.shape) for spec in SPECS}


OPTIONS = OuterConfig(trimmed=0.34)


def updates(codec: str, count: int) -> dict[int, tuple[np.ndarray, str]]:
    """Return payloads by task, the later tasks first."""
    form, made = PayloadForm(codec, SPECS), {}
    for task in reversed(range(count)):
        draw = np.random.default_rng(task)
        payload = form.encode({s.name: draw.standard_normal(s.shape).astype(np.float32) for s in SPECS})
        made[7 + task] = payload, payload_digest(payload)
    return made


def gateway_step(codec: str, payloads: dict[int, tuple[np.ndarray, str]], rule: str, rate: float = 1.0) -> OuterStep:
    form = PayloadForm(codec, SPECS)
    parts = [Contribution(task, task, form.decode(*one), form="deltas") for task, one in payloads.items()]
    return outer_step(
        SPECS, initial_state(SPECS, START), parts, Nesterov(rate), rule=rule_of(MERGE_RULES.chosen(rule, OPTIONS))
    )


@pytest.mark.parametrize("rule", MERGE_RULES.built_in)
@pytest.mark.parametrize(("codec", "count", "rate"), [("sign", 3, 1.0), ("float32", 1, 1.0), ("int4", 5, 1.7)])
def test_every_merge_rule_gives_a_worker_the_gateways_bits(rule: str, codec: str, count: int, rate: float) -> None:
    payloads = updates(codec, count)
    step = gateway_step(codec, payloads, rule, rate)
    worker, chosen = RelayedVersion(codec, SPECS, START), rule_of(MERGE_RULES.chosen(rule, OPTIONS))
    assert chosen.chosen == Chosen(rule, {"trimmed": 0.34} if rule == "trimmed_mean" else {})
    assert step.coefficients is not None
    worker.advance(payloads, step.coefficients, chosen, params_digest(SPECS, step.state.params), rate=step.rate)
    for name, values in step.state.params.items():
        assert worker.params[name].tobytes() == values.tobytes()


def test_other_bits_are_refused_and_the_version_before_stays() -> None:
    payloads = updates("sign", 2)
    step = gateway_step("sign", payloads, "rda")
    assert step.coefficients is not None
    digest, worker, rule = params_digest(SPECS, step.state.params), RelayedVersion("sign", SPECS, START), Radial()
    with pytest.raises(ProtocolError, match="computes other bits than the gateway, or began from others"):
        worker.advance(payloads, step.coefficients * 1.001, rule, digest)
    with pytest.raises(ProtocolError, match="its digest is"):
        worker.advance({**payloads, 7: (payloads[7][0], "0" * 32)}, step.coefficients, rule, digest)
    with pytest.raises(ProtocolError, match="outer step failed: the outer step made the parameters of 'w' NaN"):
        worker.advance(payloads, step.coefficients * 1e150, rule, digest)
    with pytest.raises(LocalProtocolError, match=r"expected coefficients \[3, 2\], found \[3, 1\]"):
        worker.advance(payloads, step.coefficients[:, :1], rule, digest)
    assert params_digest(SPECS, worker.params) == params_digest(SPECS, START)
    worker.advance(payloads, step.coefficients, rule, digest)
    assert params_digest(SPECS, worker.params) == digest
