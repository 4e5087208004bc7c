"""Messages and records of reinforcement learning."""
