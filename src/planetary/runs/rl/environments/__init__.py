"""Prompts, and the processes that judge the answers of a policy."""
