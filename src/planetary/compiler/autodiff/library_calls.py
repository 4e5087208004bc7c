"""Recognise calls of JAX functions whose gradient is not that of their body.

A jitted function such as `jax.nn.relu` is exported as a call of a function of its name; that JAX differentiates it as a
whole (`relu` has the gradient 0 at 0, where `maximum` has a half) leaves no trace. Where the callee has both the name
and the operations that JAX exports for the function, the call becomes a composite with a separate rule.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

from planetary.compiler import ir
from planetary.compiler.autodiff import inline, routines
from planetary.compiler.ir import Block, Type

Function: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class LibraryCall:
    """A jitted JAX function.

    Attributes:
        name: name of the composite after `routines.PREFIX`.
        symbol: name of the exported function.
        load: returns the JAX function for a first result of a shape and dtype.
    """

    name: str
    symbol: str
    load: Callable[[tuple[int, ...], str], Function]


def _plain(place: str, name: str) -> Callable[[tuple[int, ...], str], Function]:
    def load(shape: tuple[int, ...], dtype: str) -> Function:
        import jax

        places = {"nn": jax.nn, "numpy": jax.numpy, "linalg": jax.numpy.linalg, "special": jax.scipy.special}
        return getattr(places[place], name)

    return load


def _sampler(name: str) -> Callable[[tuple[int, ...], str], Function]:
    """A sampler of `jax.random` as a function of the key's raw data and the parameters."""

    @cache
    def load(shape: tuple[int, ...], dtype: str) -> Function:
        return partial(_sample, name, shape, dtype)

    return load


def _sample(name: str, shape: tuple[int, ...], dtype: str, key: Any, *parameters: Any) -> Any:
    import jax

    return getattr(jax.random, name)(jax.random.wrap_key_data(key), *parameters, shape=shape, dtype=dtype)


CALLS = (
    LibraryCall("relu", "relu", _plain("nn", "relu")),
    LibraryCall("relu6", "relu6", _plain("nn", "relu6")),
    LibraryCall("log1mexp", "log1mexp", _plain("nn", "log1mexp")),
    LibraryCall("i0", "i0", _plain("numpy", "i0")),
    LibraryCall("frexp", "frexp", _plain("numpy", "frexp")),
    LibraryCall("sici", "sici", _plain("special", "sici")),
    LibraryCall("det", "det", _plain("linalg", "det")),
    LibraryCall("pinv", "_pinv", _plain("linalg", "pinv")),
    LibraryCall("random.gamma", "_gamma", _sampler("gamma")),
    LibraryCall("random.loggamma", "_gamma", _sampler("loggamma")),
    LibraryCall("random.truncated_normal", "_truncated_normal", _sampler("truncated_normal")),
)
_SYMBOLS = {call.symbol for call in CALLS}


def composite_name(symbol: str, block: Block) -> str | None:
    """The name of the composite that stands for a call of a function, given the flattened body; None for most."""
    plain = re.sub(r"_\d+$", "", symbol)
    results = ir.terminator(block).operands
    if plain not in _SYMBOLS or not len(results) or not ir.is_differentiable_type(results[0].type):
        return None
    kinds = [argument.type for argument in block.arguments]
    for call in CALLS:
        if call.symbol == plain:
            for template in _templates(call, kinds, results[0].type):
                if routines.same_block(template, block, {}, set()):
                    return routines.PREFIX + call.name
    return None


_texts: dict[tuple[str, ...], tuple[list[str], Iterator[str]]] = {}  # known texts, and an iterator for more on demand


def _templates(call: LibraryCall, arguments: Sequence[Type], result: Type) -> Iterator[Block]:
    """Yield JAX's exports of the function, called directly and under `vmap`, parsed into the current context."""
    key = (call.name, str(result), *map(str, arguments))
    if key not in _texts:
        _texts[key] = ([], _exports(call, _specs_of([*arguments, result])))
    known, more = _texts[key]
    for position in itertools.count():
        if position == len(known):
            known += itertools.islice(more, 1)
        if position == len(known):
            return
        module = ir.parse_module(known[position])
        inline.inline_calls(module)
        yield ir.entry_block(ir.main_function(module))


_Spec: TypeAlias = tuple[tuple[int, ...], str]
_ONLY_WIDE = {"int64", "uint64", "float64", "complex128"}  # where JAX has 64-bit types switched on


def _specs_of(kinds: Sequence[Type]) -> list[_Spec]:
    """Shapes and JAX dtypes; empty if JAX has no name for one of the types."""
    from planetary.compiler.autodiff.traced import dtype_name

    try:
        return [(ir.shape_of_type(kind), dtype_name(ir.element_of_type(kind))) for kind in kinds]
    except KeyError:
        return []


def _exports(call: LibraryCall, specs: Sequence[_Spec]) -> Iterator[str]:
    import jax

    for wide in (False, True):
        if not specs or (not wide and any(dtype in _ONLY_WIDE for _, dtype in specs)):
            continue
        for is_batched in (False, True):
            with jax.enable_x64(wide):
                function = call.load(*specs[-1])
                form = jax.vmap(function) if is_batched else function
                try:
                    given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in specs[:-1]]
                    text = jax.jit(form, keep_unused=True).lower(*given).as_text()
                except (TypeError, ValueError, NotImplementedError):
                    continue  # JAX does not offer the function for these types
            yield text
