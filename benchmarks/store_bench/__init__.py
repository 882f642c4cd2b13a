"""What `run_store.py` measures beside our own store."""
