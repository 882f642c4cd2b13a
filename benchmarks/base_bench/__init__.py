"""The parts of `benchmarks/lbm_base.py`."""
