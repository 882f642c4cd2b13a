"""Train a Latent Bridge Matching model: a LoRA or every weight.

- `train`: the whole run, from loading to the written result; `dry_run` says what it would do.
- `settings`: the YAML of a run.
- `session`: all that a run works with, and how it resumes.
- `target_modules`, `lora_layers`: which layers are trained, and the factors in them.
- `objective`, `step`, `optimizers`: the loss, one optimizer step, and what changes the weights.
- `accelerate`, `deepspeed`, `distributed`: one process or many.
- `checkpoints`, `export`: what is kept to resume, and what is given away.
- `metrics`, `validation`: what a run tells while it goes on.
"""
