"""LoRA application, one question a file. `sigmascope.stages.lora_application` is the public face."""
