"""The rules, grouped by kind of operation; importing this package fills `rule_table`.

There is no list of the modules: a rule is found by being in one of them.
"""

from __future__ import annotations

import importlib
import pkgutil

from planetary.compiler.autodiff import rule_table

_COMPOSITE = "stablehlo.composite @"


def composite_names() -> list[str]:
    """Names of the composites with an entry of their own; all others are replaced by their decomposition."""
    return [name.removeprefix(_COMPOSITE) for name in rule_table.entries() if name.startswith(_COMPOSITE)]


for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
