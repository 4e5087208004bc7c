"""Tools for tests, public on purpose: a simulated world in which a whole fabric runs in one process.

Nothing in the package itself imports this. Start with `cluster.SimCluster` and `faults.draw_plan`.
"""
