"""The compiled functions of a policy: those that serve it, its training step, and log-probabilities of whole texts."""
