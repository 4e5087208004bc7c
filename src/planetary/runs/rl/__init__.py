"""Reinforcement learning: rollouts by the serving functions, gradients by a compiled step, rewards by environments.

Read first `messages.py`, then `controller.py`, which decides, `role.py` (a worker's part) and `rollouts/dialogues.py`.
`docs/rl.md` is for users.
"""
