"""Rewards become advantages, weights and terms of a loss: pure functions. Needs no JAX."""
