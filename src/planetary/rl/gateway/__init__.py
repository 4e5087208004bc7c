"""The gateway of reinforcement learning."""
