"""A worker that samples, trains, or does both by turns. Needs no JAX."""
