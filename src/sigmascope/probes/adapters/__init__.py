"""Changes that LoRAs and their kin make to a live model, read off the model without changing it."""
