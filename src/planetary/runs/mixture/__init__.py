"""A sparse mixture of experts trained over machines that are not colocated (PARALLAX, Durbin 2026).

Every composer owns some routed experts and keeps low-rank surrogates for the others; nothing that belongs to a token
crosses the network inside a step. Read first `messages.py`, then `controller/controller.py`, which decides, and
`composer/role.py`, which trains. `docs/parallax.md` maps the report's sections to files.
"""
