"""The kinds of run, siblings above the fleet, with the same files as far as each needs them: `docs/architecture.md`."""
