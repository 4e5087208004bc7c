"""PCP's configuration files, by each of their keys and the key here that means the same."""
