"""Names and manners of other libraries over planetary's own, so that their scripts run with one import changed."""
