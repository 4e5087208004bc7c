"""A trained model behind an endpoint that speaks OpenAI's HTTP interface, computed by the fleet's workers.

Read first `controller.py`, which decides, then `scheduling/scheduler.py`, `role.py` (a worker's part) and
`http/endpoint.py`. `docs/serving.md` is for users.
"""
