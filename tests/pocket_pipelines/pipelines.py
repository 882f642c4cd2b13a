"""A Stable Diffusion and a Stable Diffusion 3 in small: diffusers' own classes, with weights trained by
scripts/pocket/train_pipelines.py.

`unet` is a StableDiffusionPipeline: a UNet with cross attention that predicts noise. `mmdit` is a
StableDiffusion3Pipeline: a transformer of joint attention that predicts the velocity of a flow. `base` paints a solid
before a wall under the warm light of the pocket LBM, `tuned` under its cool one; every weight of its denoiser is
fine-tuned. The text encoders are the base's, and the VAE is the pocket LBM's.
"""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tests.families.tokenizers import clip_tokenizer_of
from tests.families.weights import built
from tests.pocket_pipelines.solids import WORDS
from torch import nn

WEIGHTS = Path(__file__).parent / "weights"
KINDS = {"unet": "unet", "mmdit": "transformer"}
"""Each kind, and what its pipeline calls the denoiser."""
LOOKS = ("base", "tuned")
TOKENS = 12
"""Of a prompt, with its start and end."""
TEXT_WIDTH = 64
LATENT_SCALE, LATENT_MEAN = 0.424, -0.732
"""1/σ and mean of the VAE's latents over the training pictures under the warm light."""


def load_pocket(kind: str, look: str) -> Any:
    """A trained pipeline in float32 on the CPU: 64×64 pixels, from the prompts of `prompts`.

    Args:
        kind: One of `KINDS`.
        look: One of `LOOKS`.
    """
    pipeline = new_pocket(kind)
    weights = load_file(WEIGHTS / f"{kind}-{look}.safetensors")
    getattr(pipeline, KINDS[kind]).load_state_dict({name: value.float() for name, value in weights.items()})
    text = load_file(WEIGHTS / f"{kind}-text.safetensors")
    text_encoders(pipeline).load_state_dict({name: value.float() for name, value in text.items()})
    return pipeline


def save_pocket(kind: str, look: str, folder: Path) -> Path:
    """Write a trained pipeline as a folder of diffusers', and give the folder."""
    load_pocket(kind, look).save_pretrained(folder)
    return folder


def text_encoders(pipeline: Any) -> nn.ModuleDict:
    """Its text encoders, by the pipeline's names."""
    names = ("text_encoder", "text_encoder_2")
    return nn.ModuleDict(
        {name: part for name in names if (part := getattr(pipeline, name, None)) is not None}
    )


def new_pocket(kind: str) -> Any:
    """A pipeline of that kind before training: the same random weights each time, and the trained VAE."""
    made = {"unet": _stable_diffusion, "mmdit": _stable_diffusion_3}[kind]()
    made.set_progress_bar_config(disable=True)
    return made


def _stable_diffusion() -> Any:
    from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel

    unet = built(
        lambda: UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(32, 56),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D",) * 2,
            up_block_types=("CrossAttnUpBlock2D",) * 2,
            attention_head_dim=(2, 4),  # heads, whatever diffusers calls it
            cross_attention_dim=TEXT_WIDTH,
            norm_num_groups=8,
        )
    )
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    return StableDiffusionPipeline(
        vae=_vae(shift=0.0),  # this pipeline knows none
        text_encoder=built(lambda: CLIPTextModel(_text_config(TEXT_WIDTH))),
        tokenizer=clip_tokenizer_of(WORDS, TOKENS),
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _stable_diffusion_3() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection

    transformer = built(
        lambda: SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            attention_head_dim=16,
            num_attention_heads=5,
            caption_projection_dim=80,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            pos_embed_max_size=16,
            qk_norm="rms_norm",
        )
    )
    # Two encoders of CLIP's, whose features stand side by side; T5's is left out, as the pipeline allows.
    first, second = (built(lambda: CLIPTextModelWithProjection(_text_config(TEXT_WIDTH // 2))) for _ in "12")
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(shift=LATENT_MEAN),
        text_encoder=first,
        tokenizer=clip_tokenizer_of(WORDS, TOKENS),
        text_encoder_2=second,
        tokenizer_2=clip_tokenizer_of(WORDS, TOKENS),
        text_encoder_3=None,
        tokenizer_3=None,
    )


def _text_config(width: int) -> Any:
    from transformers import CLIPTextConfig

    tokenizer = clip_tokenizer_of(WORDS, TOKENS)
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=width // 16,
        max_position_embeddings=TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _vae(shift: float) -> Any:
    """The pocket LBM's, with the scale that its latents have in these pictures."""
    from diffusers import AutoencoderKL

    from sigmascope import load_lbm
    from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH

    trained = load_lbm(BASE_PATH, CONFIG_PATH).vae.vae_model
    vae = AutoencoderKL(**{**trained.config, "scaling_factor": LATENT_SCALE, "shift_factor": shift})
    vae.load_state_dict(trained.state_dict())
    return vae.eval().requires_grad_(False)
