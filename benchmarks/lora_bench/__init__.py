"""What `benchmarks/lora_extraction.py` is made of: pairs of models, peers, the optimum, limits and tables."""
