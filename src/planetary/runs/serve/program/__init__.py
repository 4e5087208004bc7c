"""The compiled functions of a served model, and the cache that they share."""
