"""Models from Python: exported, compiled and differentiated; and a trained one, which continues a text."""
