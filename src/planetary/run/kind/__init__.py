"""The kinds of run, a file each; `run.kinds` finds them by name."""
