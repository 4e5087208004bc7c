"""Activation sketches (PARALLAX, 4.10): the input of a layer's experts in one step, per token and not per expert.

One row serves all k experts of a token: the input u, the gradient g_y of the layer's output before the expert's gate,
the chosen experts and their gates. An expert's own output gradient is G_e = g_e · g_y, which the worker forms. The
report's sketch repeats u and G for each of the k experts.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from planetary.core.errors import NumericsError, TrustError, UserError
from planetary.runs.mixture.config import MixtureOptions, SketchPrecision
from planetary.runs.mixture.methods.codec import FourBitRows, decode_rows, encode_rows

Precision = SketchPrecision
_KEYS = MixtureOptions()


class Sketch(msgspec.Struct, frozen=True):
    """The input of one layer's experts on one composer in one step, and their output gradients, as float32.

    Attributes:
        layer, step, composer: where and when.
        inputs: u, [tokens, d_e].
        output_gradients: g_y, [tokens, d_e], of the mean loss of that composer's batch.
        ids: chosen experts, int [tokens, k].
        gates: their gates, [tokens, k].
    """

    layer: int
    step: int
    composer: int
    inputs: np.ndarray
    output_gradients: np.ndarray
    ids: np.ndarray
    gates: np.ndarray


class EncodedSketch(msgspec.Struct, frozen=True):
    """A sketch as it travels, and the sha256 of the contents.

    `inputs` and `output_gradients` are float32 arrays or four-bit rows; ids take one byte up to 256 experts and two
    above; gates are float16, or float32 in an uncompressed sketch.
    """

    layer: int
    step: int
    composer: int
    inputs: np.ndarray | FourBitRows
    output_gradients: np.ndarray | FourBitRows
    ids: np.ndarray
    gates: np.ndarray
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.inputs.nbytes + self.output_gradients.nbytes + self.ids.nbytes + self.gates.nbytes


def dense_gates(sketch: Sketch, experts: int) -> np.ndarray:
    """Return gates float32 [tokens, experts], 0 for experts that were not chosen."""
    gates = np.zeros((len(sketch.ids), experts), np.float32)
    np.put_along_axis(gates, sketch.ids.astype(np.int64), sketch.gates, axis=1)
    return gates


def sketch_from_gates(
    place: tuple[int, int, int], inputs: np.ndarray, gradients: np.ndarray, gates: np.ndarray, active: int
) -> Sketch:
    """Return the sketch of `place` (layer, step, composer) from gates [tokens, experts] of which `active` are not 0.

    A gate that underflowed to 0 counts as chosen by rank; the expert gets a zero gradient either way.
    """
    ids = np.sort(np.argsort(-gates, axis=1, kind="stable")[:, :active], axis=1)
    chosen = np.take_along_axis(gates, ids, axis=1)
    return Sketch(*place, inputs, gradients, ids.astype(np.uint16), chosen)


def subsample(sketch: Sketch, fraction: float, seed: int) -> Sketch:
    """Return a random part of the tokens, with output gradients divided by the part kept: unbiased.

    The draw depends on (seed, composer, layer, step) alone.
    """
    if not 0 < fraction <= 1:
        raise UserError(f"the fraction of tokens in a sketch must be in (0, 1], found {fraction}")
    tokens = len(sketch.ids)
    keep = max(1, round(tokens * fraction))
    if keep == tokens:
        return sketch
    rng = np.random.Generator(np.random.PCG64([seed, sketch.composer, sketch.layer, sketch.step]))
    rows = np.sort(rng.permutation(tokens)[:keep])
    return Sketch(
        sketch.layer,
        sketch.step,
        sketch.composer,
        sketch.inputs[rows],
        sketch.output_gradients[rows] * np.float32(tokens / keep),
        sketch.ids[rows],
        sketch.gates[rows],
    )


def encode(sketch: Sketch, precision: Precision = _KEYS.precision, experts: int = 256) -> EncodedSketch:
    """Return the form that travels. Raises `NumericsError` for NaN or infinite numbers."""
    for what, array in (("gates", sketch.gates), ("inputs", sketch.inputs), ("gradients", sketch.output_gradients)):
        if not np.isfinite(array).all():
            raise NumericsError(
                f"composer {sketch.composer} cannot send the sketch of layer {sketch.layer}, step {sketch.step}: its "
                f"{what} contain NaN or infinite numbers"
            )
    ids = sketch.ids.astype(np.uint8 if experts <= 256 else np.uint16)
    if precision == "f32":
        parts = (sketch.inputs, sketch.output_gradients, ids, sketch.gates)
    else:
        parts = (
            encode_rows(sketch.inputs, seed=sketch.layer),
            encode_rows(sketch.output_gradients, seed=sketch.layer),
            ids,
            sketch.gates.astype(np.float16),
        )
    place = (sketch.layer, sketch.step, sketch.composer)
    return EncodedSketch(*place, *parts, digest=_digest(place, parts))


def decode(stored: EncodedSketch) -> Sketch:
    """Return the sketch, or raise `TrustError` where the contents are not those that were sent."""
    place = (stored.layer, stored.step, stored.composer)
    parts = (stored.inputs, stored.output_gradients, stored.ids, stored.gates)
    found = _digest(place, parts)
    if found != stored.digest:
        raise TrustError(
            f"the sketch of composer {stored.composer}, layer {stored.layer}, step {stored.step} is damaged: expected "
            f"sha256 {stored.digest[:12]}…, found {found[:12]}…; it is not used"
        )
    rows = [
        decode_rows(part, seed=stored.layer) if isinstance(part, FourBitRows) else part
        for part in (stored.inputs, stored.output_gradients)
    ]
    return Sketch(*place, rows[0], rows[1], stored.ids.astype(np.uint16), stored.gates.astype(np.float32))


def _digest(place: tuple[int, ...], parts: tuple[np.ndarray | FourBitRows, ...]) -> str:
    found = hashlib.sha256(repr(place).encode())
    for part in parts:
        arrays = (part.packed, part.scale) if isinstance(part, FourBitRows) else (part,)
        for array in arrays:
            found.update(f"{array.dtype.str}{array.shape}".encode())
            found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()
