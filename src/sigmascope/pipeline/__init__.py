"""Act on a pipeline: encode and decode in the memory there is, benchmark it, optimize it.

`encode_decode` has `encode_latents` and `decode_latents`, `bench` has `run_benchmark`, and `optimizer` has
`PipelineOptimizer`.
"""
