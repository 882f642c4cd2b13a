"""Low-rank weight changes: their algebra, and files of them made, proved, applied and read."""
