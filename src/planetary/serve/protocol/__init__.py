"""The protocol of gateway and workers while they serve."""
