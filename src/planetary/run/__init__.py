"""Runs on this machine: started, followed, stopped, resumed and read. The command line and Python share it.

`train` starts a run and returns a `handle.Run`; `processes.local_run` orchestrates the processes.
"""
