"""Train one model on many unreliable machines.

The layers, lowest first: `core`, `wire`, then `net`, `artifacts` and `compiler`, then `runtime`, then `diloco`,
`data` and `models`, then `fabric`, then `monitor`, then `cli`. A package imports only from layers below its own.
"""

from planetary.version import __version__

__all__ = ["__version__"]
