"""The parts of an extraction: layers in parallel, the journal that survives a kill, the file and its description."""
