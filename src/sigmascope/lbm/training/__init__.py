"""The parts of training an LBM: settings, what is trained, the loss, checkpoints and the loop."""
