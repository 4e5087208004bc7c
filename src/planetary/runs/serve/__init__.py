"""Serving a trained model over the fabric's workers, behind an endpoint that speaks OpenAI's HTTP interface."""
