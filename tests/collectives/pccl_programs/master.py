"""A master program as users of PCCL write it: nothing waits at its end."""

import sys

from pccl import MasterNode


def main() -> None:
    master = MasterNode(listen_address=sys.argv[1])
    master.run()
    print("serving", master.address if hasattr(master, "address") else sys.argv[1], flush=True)


main()
