"""Recognise calls of JAX functions whose gradient is not that of their body.

A jitted function such as `jax.nn.relu` is exported as a call of a function of its name; that JAX differentiates it as a
whole (`relu` has the gradient 0 at 0, where `maximum` has a half) leaves no trace. Where the callee has both the name
and the operations that JAX exports for the function, the call becomes a composite with a rule of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from planetary.compiler import inline, ir, routines
from planetary.compiler.ir import Block, Type


@dataclass(frozen=True)
class LibraryCall:
    """A jitted JAX function of one array.

    Attributes:
        name: name of the composite after `routines.PREFIX`.
        symbol: name of the exported function.
        load: returns the JAX function.
    """

    name: str
    symbol: str
    load: Callable[[], Callable[..., Any]]


def _nn(name: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        import jax

        return getattr(jax.nn, name)

    return load


def _numpy(name: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        import jax

        return getattr(jax.numpy, name)

    return load


def _linalg(name: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        import jax

        return getattr(jax.numpy.linalg, name)

    return load


CALLS = (
    LibraryCall("relu", "relu", _nn("relu")),
    LibraryCall("relu6", "relu6", _nn("relu6")),
    LibraryCall("log1mexp", "log1mexp", _nn("log1mexp")),
    LibraryCall("i0", "i0", _numpy("i0")),
    LibraryCall("det", "det", _linalg("det")),
    LibraryCall("pinv", "_pinv", _linalg("pinv")),
)
_BY_SYMBOL = {call.symbol: call for call in CALLS}


def composite_name(symbol: str, block: Block) -> str | None:
    """The name of the composite that stands for a call of a function, given its flattened body; None for most."""
    call = _BY_SYMBOL.get(re.sub(r"_\d+$", "", symbol))
    if call is None or len(block.arguments) != 1:
        return None
    kind = block.arguments[0].type
    if not ir.is_differentiable_type(kind):
        return None
    for template in _templates(call, kind):
        if routines.same_block(template, block, {}, set()):
            return routines.PREFIX + call.name
    return None


_texts: dict[tuple[str, str], list[str]] = {}


def _templates(call: LibraryCall, kind: Type) -> Iterator[Block]:
    """What JAX exports for the function, called directly and under `vmap`, parsed into the current context."""
    key = (call.name, str(kind))
    if key not in _texts:
        _texts[key] = list(dict.fromkeys(_exports(call, kind)))
    for text in _texts[key]:
        module = ir.parse_module(text)
        inline.inline_calls(module)
        yield ir.entry_block(ir.main_function(module))


def _exports(call: LibraryCall, kind: Type) -> Iterator[str]:
    import jax

    from planetary.compiler.traced import dtype_name

    function = call.load()
    for wide in (False, True):
        with jax.enable_x64(wide):
            for form in (function, jax.vmap(function)):
                try:
                    spec = jax.ShapeDtypeStruct(ir.shape_of_type(kind), dtype_name(ir.element_of_type(kind)))
                    yield jax.jit(form, keep_unused=True).lower(spec).as_text()
                except (KeyError, TypeError, ValueError, NotImplementedError):
                    continue  # JAX does not offer the function for this type
