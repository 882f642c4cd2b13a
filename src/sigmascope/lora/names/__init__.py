"""What layers are called: in diffusers, in original files, in LoRA files, and how one finds the other."""
