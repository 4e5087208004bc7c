"""Names and manners of other libraries over planetary's own, so their scripts run with one import changed."""
