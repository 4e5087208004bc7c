"""The production master and peers of the collectives in a simulated world: their threads, sockets, time and disk."""
