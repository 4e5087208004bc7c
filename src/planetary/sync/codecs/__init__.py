"""Codecs of updates: how one float32 tensor travels as bytes."""
