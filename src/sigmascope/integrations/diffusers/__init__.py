"""Diffusers pipelines watched from outside: stages, steps and facts of unchanged code.

`watch` opens a session. A session puts instruments on pipelines: each follows one kind of event (calls, text
encoding, the VAE, the denoiser, the scheduler, LoRAs, loading) through taps on methods and hooks on modules, and
takes them off again. An activity is what a session has open in one thread or task.
"""
