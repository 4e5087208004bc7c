"""A site: one gateway process with several runs, the workers that they share, and its control API."""
