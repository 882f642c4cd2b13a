"""The parts of a trace: slices and their tracks, counters, arguments, and what is kept private."""
