"""Simulated runs of reinforcement learning."""
