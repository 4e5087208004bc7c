"""The compiled functions of a policy: serving, the training step, and log-probabilities of whole rollouts."""
