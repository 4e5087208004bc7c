"""The kernel of all participants of a protocol: pure machines, their states, events and waits."""
