"""Latent Bridge Matching (arXiv 2503.07535): configuration, model, bridge mathematics, inference."""
