"""Which backend a machine takes, and what it says of it."""

from __future__ import annotations

import importlib.util

import pytest

from planetary.core.errors import UserError
from planetary.runs.rounds.worker.backend_trial import choose_backend
from planetary.runtime import backends

BOTH = ("cpu", "pjrt:cpu")


@pytest.mark.parametrize(
    ("times", "chosen", "why"),
    [
        ({"cpu": [95, 92], "pjrt:cpu": [164]}, "cpu", "cpu 92 ms, pjrt:cpu 164 ms a step: taking cpu"),
        ({"cpu": [200], "pjrt:cpu": [300, 164]}, "pjrt:cpu", "cpu 200 ms, pjrt:cpu 164 ms a step: taking pjrt:cpu"),
        ({"cpu": [100], "pjrt:cpu": [96]}, "cpu", "cpu 100 ms, pjrt:cpu 96 ms a step: taking cpu"),
        ({"cpu": [1.25], "pjrt:cpu": [0.5]}, "pjrt:cpu", "cpu 1.2 ms, pjrt:cpu 0.5 ms a step: taking pjrt:cpu"),
    ],
)
def test_the_fastest_is_taken_if_it_is_not_noise(times: dict[str, list[float]], chosen: str, why: str) -> None:
    choice = choose_backend(BOTH, times, {})
    assert (choice.backend, choice.why) == (chosen, why)


def test_a_backend_that_fails_is_named_with_its_reason() -> None:
    choice = choose_backend(("cuda", *BOTH), {"cpu": [9.0]}, {"cuda": "'head' is off", "pjrt:cpu": "killed by SIGKILL"})
    assert choice.backend == "cpu"
    assert choice.why == "cpu 9 ms a step: taking cpu; cuda: 'head' is off; pjrt:cpu: killed by SIGKILL"


def test_without_any_measurement_the_first_is_taken_and_says_why() -> None:
    choice = choose_backend(BOTH, {"cpu": []}, {"cpu": "no such file", "pjrt:cpu": "no such file"})
    assert choice.backend == "cpu"
    assert "no backend could be measured (cpu: no such file; pjrt:cpu: no such file): taking cpu" in choice.why


def test_pjrt_is_a_candidate_where_jax_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.installed_backends()[-2:] == ["cpu", "pjrt:cpu"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert backends.installed_backends()[-1] == "cpu"


def test_threads_are_for_cpus_and_numbers_start_at_0() -> None:
    for backend in ("cuda", "vulkan", "pjrt:cuda"):
        with pytest.raises(UserError, match=f"4 threads for backend '{backend}'"):
            backends.check_device(backend, 0, 4)
    with pytest.raises(UserError, match="starts at 0, found -1"):
        backends.check_device("cuda", -1, None)
    with pytest.raises(UserError, match="at least 1 thread"):
        backends.check_device("pjrt:cpu", 0, 0)
    backends.check_device("cuda", 1, None)
    backends.check_device("cpu", 1, 4)
