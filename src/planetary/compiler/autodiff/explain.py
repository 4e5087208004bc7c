"""Which of a model's operations have a rule, which are inactive and which are unsupported; and the table as a page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from planetary.compiler import ir
from planetary.compiler.autodiff import inline, library_calls, routines, rule_table, rules

_TITLES = {
    "rule": "Operations with a rule",
    "inactive": "Inactive operations",
    "unsupported": "Unsupported operations",
}


@dataclass(frozen=True)
class OperationUse:
    """One kind of operation in a model.

    Attributes:
        name: as in the rule table, e.g. `"stablehlo.add"`.
        count: how often it occurs after inlining.
        status: `"rule"`, `"inactive"`, `"unsupported"` or `"unknown"`.
        why: the note, reason, or remedy.
    """

    name: str
    count: int
    status: str
    why: str


def explain(source: str | bytes) -> list[OperationUse]:
    """List a model's operations with their status, sorted by status and name.

    Args:
        source: StableHLO text, MLIR bytecode or a portable artifact.

    Raises:
        CompileError: it does not parse.
    """
    with ir.new_context():
        module = ir.parse_module(source)
        inline.inline_calls(module, rules.composite_names(), library_calls.composite_name)
        routines.recognise(module)
        counts: Counter[str] = Counter()
        main = ir.main_function(module)
        ir.walk(main, lambda op: counts.update([rule_table.key_of(op)]))
    for structure in ("func.func", "func.return", "stablehlo.return"):
        counts.pop(structure, None)
    return sorted((_use(name, count) for name, count in counts.items()), key=lambda use: (use.status, use.name))


def _use(name: str, count: int) -> OperationUse:
    entry = rule_table.entries().get(name)
    if entry is None:
        return OperationUse(name, count, "unknown", "it stands in no table; report it with the model")
    status, why = _status(entry)
    return OperationUse(name, count, status, why)


def _status(entry: rule_table.RuleEntry) -> tuple[str, str]:
    if entry.rule is not None:
        return "rule", entry.note
    if entry.inactive is not None:
        return "inactive", entry.inactive
    return "unsupported", entry.unsupported or ""


def operations_page() -> str:
    """The page docs/ops.md: every operation of the rule table, in Markdown."""
    lines = [
        "# Operations that `differentiate` knows",
        "",
        "Generated from the rule table by `python -m planetary.compiler.autodiff.explain > docs/ops.md`; a test keeps",
        "it current. Any other operation on the path from a `wrt` argument to a result raises `UnsupportedOpError`.",
        "Composites without a row here are differentiated through their decomposition, calls through the callee.",
    ]
    for status, title in _TITLES.items():
        lines += ["", f"## {title}", "", "| operation | note |", "|---|---|"]
        for name, entry in sorted(rule_table.entries().items()):
            found, why = _status(entry)
            if found == status:
                lines.append(f"| `{name}` | {why} |")
    lines += [
        "",
        "## Functions recognised in the operations that they are exported as",
        "",
        "JAX differentiates these as a whole, not by their arithmetic, which overflows or meets a tie on the way;",
        "so does `differentiate` wherever it finds the same arithmetic.",
        "",
        *(f"- `{name}`" for name in sorted(rule_table.patterns())),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(operations_page())
