"""The compiled functions of a served model, and the cache they share."""
