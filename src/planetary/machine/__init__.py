"""What every participant of a protocol shares: pure machines, their states, events and waits."""
