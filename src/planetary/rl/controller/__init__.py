"""Decisions: which groups are sampled, judged, dropped and trained. No I/O."""
