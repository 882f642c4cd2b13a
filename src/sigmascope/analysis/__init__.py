"""What records and tensors say when they are looked at: pure functions, nothing watched and nothing written."""
