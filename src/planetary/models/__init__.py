"""Models that come with the package; each module has `build` for `model.source`, and `logits` for generation."""
