"""What may keep this machine from taking part in a run, and what its links can do."""
