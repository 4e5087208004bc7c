"""The part of every kind of run: gateway, worker, supervisor and node manager, and their messages.

Read first `fleet/gateway/gateway.py:Gateway`, of which each kind makes its own, then `fleet/controller/controller.py`
(the decisions every kind takes) and `fleet/worker/role.py` (the part of a worker a kind fills in). Nothing here knows a
kind: `docs/architecture.md` has a page of the fleet.
"""
