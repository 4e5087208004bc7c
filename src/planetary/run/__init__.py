"""Runs on this machine: started, followed, stopped, resumed and read. The command line and Python share it.

`train` starts a run and returns a `Run`; `local_run` orchestrates its processes, `gateway_role` is the process that
coordinates it.
"""
