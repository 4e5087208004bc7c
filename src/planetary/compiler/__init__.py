"""From a model to a compiled training step.

Public from Python are `planetary.export`, `planetary.compile` and `planetary.vjp`.
"""
