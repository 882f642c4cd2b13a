"""The parts of applying to a running model: factors placed beside a layer, weights that can be put back."""
