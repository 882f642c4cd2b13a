"""Diffusers pipelines watched from outside: stages, steps and facts of unchanged code.

`watch` opens a `Session`. The session puts observers on pipelines, one for each kind of event (calls, text encoding,
the VAE, the denoiser, the scheduler, LoRAs, loading). An observer hears its event through hooks on methods and modules,
and enters a stage on the `StageStack` of the thread or task. When the block is left, every hook is taken off again.
"""
