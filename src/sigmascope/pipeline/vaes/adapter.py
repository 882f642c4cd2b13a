"""Which adapter answers for which VAE."""

from sigmascope.pipeline.vaes.comfyui_vae import ComfyuiVae, is_comfyui
from sigmascope.pipeline.vaes.module_vae import ModuleVae
from sigmascope.stages.latents.vae_facts import inner_vae, vae_facts

Vae = ModuleVae | ComfyuiVae


def adapted(vae: object) -> Vae:
    """The adapter for a VAE, a pipeline that has one, or any object with `encode` or `decode`.

    Raises:
        ConfigError: ComfyUI's VAE object without a VAE in it.
    """
    inner = inner_vae(vae)
    facts = vae_facts(inner)
    return ComfyuiVae(inner, facts) if is_comfyui(inner) else ModuleVae(inner, facts)
