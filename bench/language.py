"""Count words of our own list in docstrings, comments and pages: `python bench/language.py`, part of `make lint`.

A rate above the package's limit below is an error. Limits are lowered with the text, and never raised: write the noun
("the payload", "the holder") in place of "what ..." and "whoever ...".
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "planetary"
WHAT = re.compile(r"\bwhat\b", re.IGNORECASE)
PERSONS = re.compile(r"\b(nobody|everybody|whoever|somebody|is told|are told|hears of)\b", re.IGNORECASE)

LIMITS = {
    "artifacts": (0.5, 0.5),
    "cli": (0.5, 0.5),
    "compiler": (0.5, 0.5),
    "core": (0.5, 0.5),
    "data": (0.5, 0.5),
    "diloco": (0.5, 0.5),
    "machine": (1.5, 0.5),
    "models": (0.5, 0.5),
    "moe": (1.5, 0.5),
    "monitor": (0.5, 0.5),
    "net": (0.5, 0.5),
    "rl": (0.5, 0.5),
    "run": (0.5, 0.5),
    "runtime": (0.5, 0.5),
    "serve": (0.5, 0.5),
    "site": (0.5, 0.5),
    "wire": (1.5, 0.5),
    "docs": (0.5, 0.5),
    "collectives": (0.5, 0.5),
    "compat": (0.5, 0.5),
    "fabric": (0.5, 0.5),
    "simulation": (0.5, 0.5),
    "testing": (0.5, 0.5),
    "web": (1, 0.5),
    "others": (0.5, 0.5),
}
"""Per 1,000 words: "what", and the other words of the list."""


def prose(path: Path) -> str:
    """Return the docstrings and comments of a module, or the text of a page without its code."""
    text = path.read_text()
    if path.suffix == ".md":
        return re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [token.string for token in tokens if token.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(ast.get_docstring(node) or "")
    return "\n".join(found)


def rates(paths: Iterable[Path]) -> tuple[float, float]:
    """Return occurrences per 1,000 words: of "what", and of the other words."""
    text = "\n".join(prose(path) for path in paths)
    words = len(re.findall(r"\w+", text)) or 1
    return 1000 * len(WHAT.findall(text)) / words, 1000 * len(PERSONS.findall(text)) / words


def texts() -> dict[str, list[Path]]:
    """Return the files whose language is counted together."""
    folders = [folder for folder in sorted(PACKAGE.iterdir()) if folder.is_dir() and folder.name != "__pycache__"]
    named = {folder.name: sorted(folder.rglob("*.py")) for folder in folders}
    return {**named, "docs": [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]}


def main() -> int:
    too_many = []
    for name, paths in texts().items():
        found, limits = rates(paths), LIMITS.get(name, LIMITS["others"])
        print(f'{name:14}"what" {found[0]:5.1f} of {limits[0]:3}   others {found[1]:4.1f} of {limits[1]}')
        if any(rate > limit for rate, limit in zip(found, limits, strict=True)):
            too_many.append(name)
    if too_many:
        print(f"more per 1,000 words than the limit: {', '.join(too_many)}; see bench/language.py")
    return 1 if too_many else 0


if __name__ == "__main__":
    sys.exit(main())
