"""The processes of a run: the gateway, the local run with gateway and workers, and how Python follows it."""
