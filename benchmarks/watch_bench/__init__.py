"""What `watch_overhead.py` measures with."""
