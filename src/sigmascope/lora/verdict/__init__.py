"""Whether a LoRA file is for a model: the verdict, module by module, and the findings it comes to."""
