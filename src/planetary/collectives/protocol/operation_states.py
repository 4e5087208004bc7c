"""The life of an operation as tables: at the master, and on a peer. The diagrams in the manual are made from them."""

from __future__ import annotations

from planetary.machine.state_table import Table

MASTER_OPERATION: Table = {
    ("gathering", "all members came"): "running",
    ("gathering", "all brought their data"): "committed",
    ("gathering", "arguments differ"): "refused",
    ("gathering", "deadline"): "refused",
    ("running", "all completed"): "committed",
    ("running", "a peer failed or is gone"): "aborted",
    ("running", "link fault"): "faulty",
    ("faulty", "a peer failed or is gone"): "aborted",
    ("running", "digests differ"): "aborted",
}
"""`refused`, `committed` and `aborted` are final, and the same for every member.

`faulty`: a peer reported a fault of the link to another one, which may have died: the master will know soon.
"""

PEER_OPERATION: Table = {
    ("wanted", "commence"): "running",
    ("wanted", "committed"): "succeeded",
    ("wanted", "refused"): "failed",
    ("wanted", "master lost"): "failed",
    ("running", "all pieces came"): "completed",
    ("running", "link fault"): "faulty",
    ("running", "aborted"): "failed",
    ("running", "master lost"): "failed",
    ("completed", "committed"): "succeeded",
    ("completed", "aborted"): "failed",
    ("completed", "link fault"): "completed",  # a neighbour that is done may already be gone
    ("completed", "master lost"): "in doubt",
    ("faulty", "link fault"): "faulty",
    ("faulty", "all pieces came"): "faulty",
    ("faulty", "aborted"): "failed",
    ("faulty", "master lost"): "failed",
    ("in doubt", "committed"): "succeeded",
    ("in doubt", "aborted"): "failed",
    ("in doubt", "master lost"): "in doubt",
    ("in doubt", "gave up"): "failed",
    ("in doubt", "link fault"): "in doubt",
}
"""On `failed` the caller's arrays are restored; until `succeeded` they can be."""

PEER_MEMBERSHIP: Table = {
    ("outside", "registered"): "waiting",
    ("outside", "returned"): "member",
    ("waiting", "admitted"): "member",
    ("waiting", "removed"): "outside",
    ("waiting", "master lost"): "outside",
    ("member", "topology"): "member",
    ("member", "removed"): "outside",
    ("member", "master lost"): "away",
    ("away", "returned"): "member",
    ("away", "gave up"): "outside",
    ("away", "master lost"): "away",
    ("away", "removed"): "outside",
}
"""`away`: the master may be restarting; within the grace time a member returns with everything it was."""
