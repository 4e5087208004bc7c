"""Random numbers of a loss that are equal in every step: the key depends on no changing argument.

Dropout with a key made in the loss, or kept in a buffer, is one mask for the whole run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src import source_info_util
from jax.extend.core import Literal, jaxprs_in_params

_DRAWS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})


def constant_draws(jaxpr: Any, changing: Sequence[bool]) -> list[str]:
    """Return the source lines, each once, that draw random numbers which are the same in every step.

    Args:
        jaxpr: a closed jaxpr of the loss.
        changing: for each argument, whether it differs between steps.
    """
    lines: dict[str, None] = {}
    _walk(jaxpr.jaxpr, list(changing), lines, "")
    return list(lines)


def _walk(jaxpr: Any, changing: Sequence[bool], lines: dict[str, None], caller: str) -> list[bool]:
    """Note the constant draws of a jaxpr; return which results change between steps.

    `caller`: the author's line that calls it.
    """
    moving = {var for var, changes in zip(jaxpr.invars, changing, strict=True) if changes}
    for eqn in jaxpr.eqns:
        given = [not isinstance(atom, Literal) and atom in moving for atom in eqn.invars]
        inner = list(jaxprs_in_params(eqn.params))
        if not inner:
            if eqn.primitive.name in _DRAWS and not any(given):
                lines.setdefault(_line(eqn, caller) or "an unknown line")
            results = [any(given)] * len(eqn.outvars)
        else:
            results = _walk_inner(eqn, inner, given, lines, _line(eqn, caller))
        moving.update(var for var, changes in zip(eqn.outvars, results, strict=True) if changes)
    return [not isinstance(atom, Literal) and atom in moving for atom in jaxpr.outvars]


def _walk_inner(
    eqn: Any, inner: Sequence[Any], given: Sequence[bool], lines: dict[str, None], caller: str
) -> list[bool]:
    carried = _carried(eqn)
    given = list(given)
    while True:
        noted: dict[str, None] = {}
        # The arguments of a body are the operation's last ones: conditions and indices come before.
        found = [_walk(one, given[len(given) - len(one.invars) :], noted, caller) for one in inner if _fits(one, eqn)]
        results = [any(one[i] for one in found if i < len(one)) for i in range(len(eqn.outvars))]
        if not found:
            results = [any(given)] * len(eqn.outvars)
        if eqn.primitive.name == "cond" and given[0]:
            results = [True] * len(results)
        more = [position for result, position in enumerate(carried) if results[result] and not given[position]]
        if not more:
            lines.update(noted)
            return results
        for position in more:
            given[position] = True


def _fits(jaxpr: Any, eqn: Any) -> bool:
    """Whether a jaxpr of an operation is the body, with the operation's results."""
    return len(jaxpr.outvars) == len(eqn.outvars) and len(jaxpr.invars) <= len(eqn.invars)


def _carried(eqn: Any) -> list[int]:
    """Return the position of the argument that each of a loop's first results becomes in the next turn."""
    if eqn.primitive.name == "scan":
        first, count = eqn.params["num_consts"], eqn.params["num_carry"]
        return list(range(first, first + count))
    if eqn.primitive.name == "while":
        count = len(eqn.outvars)
        return list(range(len(eqn.invars) - count, len(eqn.invars)))
    return []


def _line(eqn: Any, caller: str) -> str:
    frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    own = [frame for frame in frames if "site-packages" not in frame.file_name] or frames  # not a library's line
    return f"{own[0].file_name}:{own[0].start_line}" if own else caller
