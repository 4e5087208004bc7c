"""What gateway and workers say to each other while they serve."""
