"""A site: one gateway process with several runs, the workers they share, and the control API."""
