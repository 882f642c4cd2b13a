"""Train a Latent Bridge Matching model: a LoRA or every weight.

- `train`: the whole run, from loading to the written result; `dry_run` says what it would do.
- `settings`: the YAML of a run.
- `session`: all that a run works with, how it resumes, and what it writes in the end.
- `lora_layers`: which layers are trained, and the factors in them.
- `objective`: the loss.
- `accelerate`: one optimizer step, by whatever trains: one process, DDP, FSDP or DeepSpeed.
- `distributed`: what processes agree on, tensors in parts, and DeepSpeed's settings.
- `checkpoints`: what is kept to resume.
- `metrics`: what a run tells while it goes on, and validation.
"""
