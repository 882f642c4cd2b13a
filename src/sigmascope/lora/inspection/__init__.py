"""The parts of inspecting and comparing: strength, directions, differences, and what headers say."""
