"""Tools for tests, public on purpose: relays that shape and cut real connections on one machine.

Nothing in the package itself imports this. A fabric in one process is in `planetary.simulation`.
"""
