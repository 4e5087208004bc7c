"""Prompts, and the processes that judge what a policy answers."""
