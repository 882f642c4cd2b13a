"""LoRA file formats: how kohya, PEFT, ComfyUI and LBM name a module and its tensors."""
