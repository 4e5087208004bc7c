"""A whole fabric in one process and in simulated time: real machines, real outer mathematics, drawn faults.

`planetary.simulate` runs a configuration in it with the configured training step; tests run thousands of fault
schedules with a small known function in place of training. Start with `cluster.SimCluster` and `faults.draw_plan`.
"""
