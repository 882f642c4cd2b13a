"""The parts of resizing and merging: lowering ranks, ways to merge, and weights with changes added."""
