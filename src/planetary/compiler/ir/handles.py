"""Names of the bindings' types. The bindings mix views and plain objects freely: the names help the reader, not the
type checker.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Value: TypeAlias = Any
Operation: TypeAlias = Any
Block: TypeAlias = Any
Type: TypeAlias = Any
Attribute: TypeAlias = Any
Module: TypeAlias = Any
Location: TypeAlias = Any
