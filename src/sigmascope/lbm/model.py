"""The LBM model: a text-free SDXL-shaped denoiser and a VAE, with exactly LBM's state-dict keys.

Keys (SPEC section 7): `denoiser.*` are those of diffusers' `UNet2DConditionModel`, `vae.vae_model.*` those of
`AutoencoderKL`, `num_iterations` is a float32 scalar.
"""

from pathlib import Path

import torch
from diffusers import UNet2DConditionModel
from jaxtyping import Float
from torch import Tensor, nn

from sigmascope.checkpoints import Checkpoint, open_checkpoint
from sigmascope.errors import ModelMismatchError
from sigmascope.lbm.config import LbmConfig, load_config
from sigmascope.lbm.loading import assign_weights, config_for
from sigmascope.lbm.vae import LbmVae
from sigmascope.progress import Progress, no_progress


class LbmModel(nn.Module):
    """Denoiser, VAE and the number of training iterations."""

    num_iterations: Float[Tensor, ""]

    def __init__(self, config: LbmConfig) -> None:
        super().__init__()
        self.config = config
        self.denoiser = _build_denoiser(config)
        self.vae = LbmVae(config.vae)
        self.register_buffer("num_iterations", torch.zeros((), dtype=torch.float32))

    def forward(
        self,
        x_t: Float[Tensor, "batch channels height width"],
        sigma: Float[Tensor, " batch"],
        conditioning: Float[Tensor, "batch extra height width"] | None = None,
    ) -> Float[Tensor, "batch channels height width"]:
        """Predict z_source − z_target.

        Args:
            x_t: A point of the bridge; height and width multiples of `config.denoiser.factor`.
            sigma: Where on the bridge, in [0, 1]; the denoiser sees it as σ·`num_train_timesteps`.
            conditioning: Latents of the conditioning images, then the masks, when the config names any.

        Returns:
            The prediction, in the dtype of `x_t`.

        Raises:
            ModelMismatchError: The channels are not what the denoiser takes.
        """
        inputs = x_t if conditioning is None else torch.cat([x_t, conditioning.to(x_t.dtype)], dim=1)
        expected = self.config.unet_input_channels
        if inputs.shape[1] != expected:
            raise ModelMismatchError(
                f"The denoiser takes {expected} channels, got {inputs.shape[1]}.",
                hint="Pass the conditioning that the config's conditioning_images_keys and masks_keys name.",
            )
        timestep = sigma.to(torch.float32) * self.config.num_train_timesteps
        # No text: without encoder states diffusers' cross attention attends to the hidden states.
        prediction: Tensor = self.denoiser(
            inputs.to(self.denoiser.dtype), timestep, encoder_hidden_states=None, return_dict=False
        )[0]
        return prediction.to(x_t.dtype)


def build_lbm(
    config: LbmConfig | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LbmModel:
    """Build a model with freshly initialised weights (none at all on the meta device).

    Args:
        config: Of the model; None is the full-size default (2.4 billion denoiser parameters).
        device: Where the weights are made.
        dtype: Of the denoiser and the VAE; `num_iterations` stays float32.
    """
    with torch.device(device):
        model = LbmModel(config if config is not None else LbmConfig())
    for part in (model.denoiser, model.vae):
        nn.Module.to(part, dtype)  # diffusers' own `to` warns about an empty list of float32 modules
    return model


def load_lbm(
    path: str | Path,
    config: LbmConfig | str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    progress: Progress = no_progress,
) -> LbmModel:
    """Load a checkpoint, one tensor at a time, so that memory peaks at about one model.

    Under float16 the VAE stays float32 when its config says `force_upcast`: SDXL's overflows in float16.

    Args:
        path: Any layout that `open_checkpoint` reads. `lpips_loss.*` is left out.
        config: Of the model, or its YAML file. None looks for `<stem>.yaml` and `config.yaml` beside the
            checkpoint, and takes the full-size default when there is neither.
        dtype: Of the weights; `num_iterations` stays float32.
        device: Where the weights go.
        progress: Told after each tensor.

    Returns:
        The model in evaluation mode.

    Raises:
        ConfigError: The config is not valid.
        CheckpointError: The file is missing, damaged, or refused.
        ModelMismatchError: Names keys that are missing, unexpected or of another shape.
        NonFiniteError: Names the first tensor with NaN or Inf.
    """
    config = resolve_config(path, config)
    with open_checkpoint(path) as checkpoint:
        return fill_lbm(
            build_lbm(config, device="meta"), checkpoint, dtype=dtype, device=device, progress=progress
        )


def resolve_config(path: str | Path, config: LbmConfig | str | Path | None) -> LbmConfig:
    """Give the config of a checkpoint: as given, read from the file given, or the one beside `path`.

    Raises:
        ConfigError: The config is not valid.
        CheckpointError: The system refuses to look at `path`.
    """
    if config is None:
        return config_for(path)
    return config if isinstance(config, LbmConfig) else load_config(config)


def fill_lbm(
    model: LbmModel,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    progress: Progress = no_progress,
) -> LbmModel:
    """Give a model on the meta device the weights of an open checkpoint; the rest is as of `load_lbm`.

    Returns:
        The same model, in evaluation mode.
    """
    upcast = dtype == torch.float16 and model.config.vae.force_upcast
    dtypes = {
        "denoiser": dtype,
        "vae": torch.float32 if upcast else dtype,
        "num_iterations": torch.float32,
    }
    assign_weights(model, checkpoint, dtypes, device, progress=progress)
    return model.eval()


def _build_denoiser(config: LbmConfig) -> UNet2DConditionModel:
    block = config.denoiser
    return UNet2DConditionModel(
        in_channels=config.unet_input_channels,
        out_channels=config.vae_num_channels,
        block_out_channels=block.block_out_channels,
        layers_per_block=block.layers_per_block,
        down_block_types=block.down_block_types,
        up_block_types=block.up_block_types,
        mid_block_type=block.mid_block_type,
        transformer_layers_per_block=block.transformer_layers_per_block,
        attention_head_dim=block.attention_head_dim,
        cross_attention_dim=block.cross_attention_dim,
        norm_num_groups=block.norm_num_groups,
        use_linear_projection=block.use_linear_projection,
    )
