"""Rounds: workers train leases of the data, and each round ends in one outer step, in a star or a ring.

Read first `controller/controller.py`, which decides, then `worker/role.py`, which trains, and `gateway/gateway.py`,
which carries out. `docs/synchronisation.md` is for users.
"""
