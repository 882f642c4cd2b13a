"""What each family's pipeline is made of."""

from typing import Any

from tests.families import denoisers, encoders, tokenizers, vaes

_STABLE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def _scheduler(name: str, **config: Any) -> Any:
    import diffusers

    return getattr(diffusers, name)(**config)


def _flow(**config: Any) -> Any:
    return _scheduler("FlowMatchEulerDiscreteScheduler", **config)


def sd15() -> dict[str, Any]:
    return {
        "unet": denoisers.sd15_unet(),
        "vae": vaes.image_vae(),
        "text_encoder": encoders.clip(16),
        "tokenizer": tokenizers.clip_tokenizer(),
        "scheduler": _scheduler("DDIMScheduler", **_STABLE, clip_sample=False, set_alpha_to_one=False),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def sdxl() -> dict[str, Any]:
    return {
        "unet": denoisers.sdxl_unet(),
        "vae": vaes.image_vae(),
        "text_encoder": encoders.clip(16),
        "text_encoder_2": encoders.clip(20, projection=24),
        "tokenizer": tokenizers.clip_tokenizer(),
        "tokenizer_2": tokenizers.clip_tokenizer(),
        "scheduler": _scheduler("EulerDiscreteScheduler", **_STABLE),
    }


def flux() -> dict[str, Any]:
    return {
        "transformer": denoisers.flux_transformer(),
        "vae": vaes.image_vae(16),
        "text_encoder": encoders.clip(16),
        "text_encoder_2": encoders.t5(),
        "tokenizer": tokenizers.clip_tokenizer(),
        "tokenizer_2": tokenizers.t5_tokenizer(),
        "scheduler": _flow(),
    }


def sd3() -> dict[str, Any]:
    return {
        "transformer": denoisers.sd3_transformer(),
        "vae": vaes.image_vae(16),
        "text_encoder": encoders.clip(16, projection=16),
        "text_encoder_2": encoders.clip(20, projection=20),
        "text_encoder_3": encoders.t5(width=48),
        "tokenizer": tokenizers.clip_tokenizer(),
        "tokenizer_2": tokenizers.clip_tokenizer(),
        "tokenizer_3": tokenizers.t5_tokenizer(),
        "scheduler": _flow(),
    }


def qwen_image() -> dict[str, Any]:
    return {
        "transformer": denoisers.qwen_transformer(),
        "vae": vaes.video_vae(qwen=True),
        "text_encoder": encoders.qwen(),
        "tokenizer": tokenizers.qwen_tokenizer(),
        "scheduler": _flow(),
    }


def wan(*, vace: bool = False) -> dict[str, Any]:
    return {
        "transformer": denoisers.wan_transformer(vace=vace),
        "vae": vaes.video_vae(),
        "text_encoder": encoders.t5(umt5=True),
        "tokenizer": tokenizers.t5_tokenizer(),
        "scheduler": _flow(),
    }
