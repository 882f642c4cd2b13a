"""The models that LoRAs are for: families, parts, layers, and pairs of checkpoints."""
