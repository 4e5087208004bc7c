"""Products with weights in blocks: which tiles they get, and that IREE's compiler computes the product with them."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from planetary.compiler import ir
from planetary.compiler.backends.iree import run_compiler
from planetary.compiler.backends.targets import Target, compiler_flags
from planetary.compiler.rewrites.block_products import share_rows
from planetary.compiler.rewrites.weight_blocks import AVX2, AVX512, VectorUnit, store_in_blocks
from planetary.core.step import FunctionSpec
from planetary.core.tensors import TensorSpec, WeightBlocks
from planetary.runtime.host import host_features


def rewritten(unit: VectorUnit, count: int, outputs: int, kind: type = np.float32) -> tuple[str, WeightBlocks, int]:
    """Return the module of `x @ w`, the layout of `w`, and how many products were changed."""
    w, x = np.zeros((64, outputs), kind), np.zeros((count, 64), np.float32)
    with ir.new_context():
        module = ir.parse_module(jax.jit(lambda w, x: x @ w.astype(np.float32)).lower(w, x).as_text())
        specs = TensorSpec("w", "f32", w.shape), TensorSpec("x", "f32", x.shape)
        spec = FunctionSpec(specs, (TensorSpec("y", "f32", (count, outputs)),))
        (layout,) = store_in_blocks(module, {"main": spec}, ["w"], unit)
        changed = share_rows(module, unit)
        return ir.to_text(module), layout, changed


@pytest.mark.parametrize(
    ("unit", "count", "outputs", "width", "rows"),
    [
        (AVX512, 1, 64, 64, 1),
        (AVX512, 8, 64, 64, 8),
        (AVX512, 112, 64, 64, 4),
        (AVX512, 8, 86, 32, 8),  # 128 outputs would be too many
        (AVX512, 33, 64, 64, 3),
        (AVX512, 37, 64, 64, 0),  # a prime: IREE chooses
        (AVX2, 8, 64, 16, 4),
    ],
)
def test_tiles_are_whole_rows_of_a_block(unit: VectorUnit, count: int, outputs: int, width: int, rows: int) -> None:
    text, layout, changed = rewritten(unit, count, outputs)
    assert layout.width == width
    assert unit.rows(count, width) == rows
    tile = f"[1, {width}, 0]" if count == 1 and width == 64 else f"[1, {rows}, {width}, 0]"
    assert (f"vector_common_parallel = {tile}" in text) == (changed == 1) == bool(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unit", "count", "kind"),
    [(AVX512, 1, np.float32), (AVX512, 8, np.float32), (AVX2, 1, ml_dtypes.bfloat16), (AVX2, 8, ml_dtypes.bfloat16)],
)
def test_iree_computes_the_product(unit: VectorUnit, count: int, kind: type) -> None:
    import iree.runtime as iree

    text, layout, changed = rewritten(unit, count, 86, kind)
    assert changed == 1
    assert "stablehlo.convert" not in text  # bf16 is widened inside the product
    config = iree.Config("local-sync")
    context = iree.SystemContext(config=config)
    artifact = run_compiler(text, compiler_flags(Target("cpu", "host", host_features())))
    context.add_vm_module(iree.VmModule.copy_buffer(context.instance, artifact))
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((64, 86), np.float32).astype(kind), rng.standard_normal((count, 64), np.float32)
    given = [iree.asdevicearray(config.device, array) for array in (layout.store(w), x)]
    found = np.asarray(list(context.modules.values())[-1].main(*given))
    np.testing.assert_allclose(found, x @ w.astype(np.float32), rtol=1e-5, atol=1e-4)
