"""WebDataset shards: which there are, what is read from them and in which order, and how they are written."""
