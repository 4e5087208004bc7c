"""Obstacles to this machine's taking part in a run, and the rates of the links."""
