"""The outer step: contributions are judged, merged and applied, and sent in a codec. No I/O, nothing of a fleet.

Read first `outer.py`, then `rounds.py` (when a round ends) and `payload.py` (what is sent).
"""
