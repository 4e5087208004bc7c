"""`python -m planetary.compat.pccl script.py`: run a PCCL program unchanged."""

from __future__ import annotations

import sys

from planetary.compat.pccl.alias import run
from planetary.core.errors import UserError

if __name__ == "__main__":
    try:
        run(sys.argv[1:])
    except UserError as error:
        sys.exit(str(error))
