"""The processes of a run: the gateway, the local run that starts it and its workers, and how Python follows it."""
