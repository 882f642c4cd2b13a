"""The parts of a validation: errors by layer and block, findings, and the picture."""
