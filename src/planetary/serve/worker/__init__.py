"""A worker of a served model. Needs no JAX."""
