"""A site: one gateway process with several runs, the workers they share, and its control API."""
