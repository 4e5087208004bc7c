"""Wrong arguments of the Python interface are refused in a sentence that names the argument and its values."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planetary
from planetary.core.errors import UserError

SQUARE = """func.func @main(%x: tensor<f32>) -> tensor<f32> {
  %y = stablehlo.multiply %x, %x : tensor<f32>
  return %y : tensor<f32>
}"""
A_LOSS = (lambda params, x: (params["w"] * x).sum(), {"w": np.ones(3, np.float32)}, (np.ones(3, np.float32),))

vjp: Any = planetary.vjp
export: Any = planetary.export
compile: Any = planetary.compile
simulate: Any = planetary.simulate
FAULT = planetary.Fault(at_s=1.0, kind="kill_worker", worker=0)

WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: vjp(3), r"module: expected StableHLO text, bytes .* found 3 \(whole number\)"),
    (lambda: vjp(len), "module: expected StableHLO text, bytes of a module, the path of a file, or a planetary.export"),
    (lambda: vjp("no/such.mlir"), "cannot read the module no/such.mlir: No such file"),
    (lambda: vjp(SQUARE, 0), r"wrt: expected positions of the module's arguments, such as \(0,\)"),
    (lambda: vjp(SQUARE, ("x",)), r"wrt: expected positions"),
    (lambda: vjp(SQUARE, (0.0,)), r"wrt: expected positions"),
    (lambda: vjp(SQUARE, None), r"wrt: expected positions"),
    (lambda: export(None), r"source: expected a function, its name \(module:function\), a model of the zoo"),
    (lambda: export(lambda width: A_LOSS, options={"widht": 3}), r"does not take the options \['widht'\]"),
    (lambda: export(lambda: 1 // 0), "failed: ZeroDivisionError"),
    (lambda: export(lambda: A_LOSS, options=[1]), "options: expected a dictionary of the function's keyword arguments"),
    (lambda: export(lambda: A_LOSS, roles=["w"]), "roles: expected a dictionary such as"),
    (lambda: export(lambda: A_LOSS, 5), "folder: expected a path, found 5"),
    (lambda: export(lambda: (1, 2, 3)), "loss_fn must be a function, found int"),
    (lambda: export(lambda: (*A_LOSS[:2], np.ones(3))), "example_batch must be a tuple of arrays"),
    (lambda: export(int), r"int must return \(loss_fn, params, example_batch\), found int"),
    (lambda: compile(A_LOSS), "model: expected a planetary.export of a function, one of the zoo"),
    (lambda: compile(""), "there is no model ''"),
    (lambda: compile("nanochat", 3), 'target: expected a target such as "cpu:host"'),
    (lambda: compile("nanochat", preset="tiny", step="lion"), "step: expected a dictionary such as"),
    (lambda: compile("nanochat", preset="tiny", options="abc"), "options: expected a dictionary"),
    (lambda: compile("nanochat", output=7), "output: expected a path, found 7"),
    (lambda: compile("nanochat", cache=7), "cache: expected a path, found 7"),
    (lambda: compile("nanochat", cache=__file__), "cache: expected a folder, found the file"),
    (lambda: simulate(workers="2"), "fabric.workers: expected a whole number >= 1, found '2'"),
    (lambda: simulate(overrides=["a"]), "overrides: expected a dictionary such as"),
    (lambda: simulate(preset=3), "unknown preset 3"),
    (lambda: simulate(workers=2, faults="kill"), "faults: expected how many are drawn at most, or faults such as"),
    (lambda: simulate(workers=2, faults=[FAULT, "kill"]), "faults: expected how many .* found 'kill'"),
    (lambda: simulate(workers=2, faults=-1), "faults: expected a whole number >= 0, found -1"),
    (lambda: simulate(workers=2, links=[1, 2]), "links: expected a planetary.SimulatedLink"),
    (lambda: simulate(workers=2, speeds=2.0), "speeds: expected a number for each worker"),
    (lambda: simulate(workers=2, speeds=[1, 0]), "speeds: expected a finite number > 0, found 0"),
    (lambda: simulate(workers=2, step_s=-1), "step_s: expected a finite number > 0, found -1"),
    (lambda: simulate(workers=2, seed="1"), "seed: expected a whole number, found '1'"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("call", "text"), WRONG, ids=[text[:40] for _, text in WRONG])
def test_a_wrong_argument_is_named_with_what_it_takes(
    call: Callable[[], object], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANETARY_CACHE", os.fspath(tmp_path))
    with pytest.raises(UserError, match=text):
        call()


def test_numbers_of_numpy_and_paths_as_text_are_taken(tmp_path: Path) -> None:
    (tmp_path / "square.mlir").write_text(SQUARE)
    assert planetary.vjp(str(tmp_path / "square.mlir"), np.array([0])) == planetary.vjp(SQUARE)  # pyright: ignore[reportArgumentType]
