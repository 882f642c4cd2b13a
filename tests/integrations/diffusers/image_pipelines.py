"""Two more that look at pictures: one made of two pipelines, and one that makes a video."""

from typing import Any

from tests.families import encoders, tokenizers
from tests.families.weights import built
from tests.integrations.diffusers.other_pipelines import SIZE, Made, picture

_WIDTH = 16


def kandinsky() -> Made:
    """Two pipelines in one: a prior, and a decoder whose VAE is called `movq`."""
    import diffusers

    prior = built(
        lambda: diffusers.PriorTransformer(
            num_attention_heads=2, attention_head_dim=8, embedding_dim=_WIDTH, num_layers=1, num_embeddings=77
        )
    )
    unet = built(
        lambda: diffusers.UNet2DConditionModel(
            out_channels=8,
            addition_embed_type="image",
            down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            mid_block_type="UNetMidBlock2DSimpleCrossAttn",
            block_out_channels=(8, 16),
            layers_per_block=1,
            encoder_hid_dim=_WIDTH,
            encoder_hid_dim_type="image_proj",
            cross_attention_dim=8,
            attention_head_dim=4,
            norm_num_groups=4,
            resnet_time_scale_shift="scale_shift",
        )
    )
    movq = built(
        lambda: diffusers.VQModel(
            block_out_channels=(32, 64),
            down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
            up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
            latent_channels=4,
            norm_num_groups=8,
            norm_type="spatial",
            num_vq_embeddings=12,
            vq_embed_dim=4,
        )
    )
    pipeline = diffusers.KandinskyV22CombinedPipeline(
        unet=unet,
        scheduler=diffusers.DDIMScheduler(),
        movq=movq,
        prior_prior=prior,
        prior_image_encoder=_image_encoder(32),
        prior_text_encoder=encoders.clip(_WIDTH, projection=_WIDTH),
        prior_tokenizer=tokenizers.clip_tokenizer(),
        prior_scheduler=diffusers.UnCLIPScheduler(prediction_type="sample"),
        prior_image_processor=_image_processor(),
    )
    return pipeline, {"prompt": "a fox", "prior_num_inference_steps": 3, **SIZE}


def stable_video() -> Made:
    from diffusers import (
        AutoencoderKLTemporalDecoder,
        EulerDiscreteScheduler,
        StableVideoDiffusionPipeline,
        UNetSpatioTemporalConditionModel,
    )

    unet = built(
        lambda: UNetSpatioTemporalConditionModel(
            block_out_channels=(32, 64),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            cross_attention_dim=_WIDTH,
            num_attention_heads=8,
            projection_class_embeddings_input_dim=96,
            addition_time_embed_dim=32,
        )
    )
    levels = ("DownEncoderBlock2D",) * 2
    vae = built(lambda: AutoencoderKLTemporalDecoder(block_out_channels=(32, 32), down_block_types=levels))
    pipeline = StableVideoDiffusionPipeline(
        vae=vae,
        image_encoder=_image_encoder(224),
        unet=unet,
        scheduler=EulerDiscreteScheduler(prediction_type="v_prediction"),
        feature_extractor=_image_processor(),
    )
    return pipeline, {"image": picture(), "num_frames": 2, "decode_chunk_size": 1, **SIZE}


def _image_encoder(size: int) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=_WIDTH,
        intermediate_size=_WIDTH,
        projection_dim=_WIDTH,
        num_attention_heads=2,
        num_hidden_layers=1,
        image_size=size,
        patch_size=size // 4,
    )
    return built(lambda: CLIPVisionModelWithProjection(config))


def _image_processor() -> Any:
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size=32, crop_size=32)
