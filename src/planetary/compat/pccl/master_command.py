"""`pccl_master`: PCCL's console script."""

from __future__ import annotations

import argparse
import sys

from planetary.compat.pccl.master import MasterNode


def main(arguments: list[str] | None = None) -> None:
    """Serve until Ctrl+C."""
    parser = argparse.ArgumentParser(prog="pccl_master", description="Serve as the master of PCCL programs.")
    parser.add_argument("--listen-address", default="0.0.0.0:48148", metavar="HOST:PORT")
    master = MasterNode(parser.parse_args(arguments).listen_address)
    master.run()
    sys.stdout.write(f"serving {master.address}\n")
    sys.stdout.flush()
