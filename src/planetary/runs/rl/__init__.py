"""Reinforcement learning: texts by the serving functions, gradients by a compiled step, rewards by environments."""
