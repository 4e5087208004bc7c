"""The gateway of a served model."""
