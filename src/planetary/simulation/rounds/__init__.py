"""Runs in rounds, and federations of them, in simulated time."""
