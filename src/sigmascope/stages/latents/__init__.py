"""Latent encoding and decoding, one question a file. `sigmascope.stages.latent_encoding` is the public face."""
