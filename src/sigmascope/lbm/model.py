"""The LBM model: a text-free SDXL-shaped denoiser and a VAE, with exactly LBM's state-dict keys.

`denoiser.*` are the keys of diffusers' `UNet2DConditionModel`, `vae.vae_model.*` those of `AutoencoderKL`, and
`num_iterations` is a float32 scalar.

A model is built on the meta device and filled from a checkpoint one tensor at a time. If the two do not fit, the error
names the keys that are missing, unexpected or of another shape.
"""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from sigmascope.checkpoints import Checkpoint, open_checkpoint
from sigmascope.errors import CheckpointError, ModelMismatchError, NonFiniteError
from sigmascope.lbm.config import LbmConfig, VaeConfig, resolve_config
from sigmascope.monitor import stage
from sigmascope.pipeline.tile_plan import TilePlan, plan
from sigmascope.pipeline.tiling import tiled_map
from sigmascope.progress import Progress, no_progress

Images = Float[Tensor, "batch 3 height width"]
Latents = Float[Tensor, "batch channels latent_height latent_width"]

NAMED = 5
"""How many keys of a kind an error names before it counts the rest."""


class LbmModel(nn.Module):
    """Denoiser, VAE and the number of training iterations."""

    num_iterations: Float[Tensor, ""]

    def __init__(self, config: LbmConfig) -> None:
        super().__init__()
        self.config = config
        self.denoiser = UNet2DConditionModel(
            in_channels=config.unet_input_channels,
            out_channels=config.vae_num_channels,
            **config.denoiser.model_dump(),
        )
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
            conditioning: As `join_conditioning` gives it, when the config names any.

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


def join_conditioning(
    masks: Sequence[Float[Tensor, "batch 1 _ _"]],
    images: Sequence[Latents],
    like: Latents,
) -> Float[Tensor, "batch extra latent_height latent_width"] | None:
    """Join the denoiser's inputs besides the latent, in LBM's order: masks first, then images.

    Masks are resized to the latent's size with antialiased bilinear interpolation, as LBM's own conditioner does.

    Args:
        masks: In [0, 1], at image size, in the order of the config's `conditioning_masks_keys`.
        images: Latents of the conditioning images, in the order of its `conditioning_images_keys`.
        like: The latent that is conditioned; the result has its size, dtype and device.

    Returns:
        The joined channels; None if there are neither masks nor images.
    """
    size = like.shape[-2:]
    parts = [functional.interpolate(mask, size, mode="bilinear", antialias=True).to(like) for mask in masks]
    parts += [image.to(like) for image in images]
    return torch.cat(parts, dim=1) if parts else None


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

    Loading is a stage of the current recorder, if there is one. It holds file, format ("safetensors" or "pickle"),
    bytes of all files, parameters, dtype, device, and missing and unexpected keys (also if loading fails because of
    them). Its duration is the load time.

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
    with stage("model_loading") as recorded:
        recorded.fact("file", str(path))
        recorded.fact("dtype", str(dtype).removeprefix("torch."))
        recorded.fact("device", str(device))
        config = resolve_config(path, config)
        with open_checkpoint(path) as checkpoint:
            recorded.fact("format", checkpoint.format)
            recorded.fact("file_bytes", sum(file.stat().st_size for file in checkpoint.files))
            model = build_lbm(config, device="meta")
            missing, unexpected = compare_keys(model.state_dict(), checkpoint)
            recorded.fact("missing_keys", missing)
            recorded.fact("unexpected_keys", unexpected)
            upcast = dtype == torch.float16 and model.config.vae.force_upcast
            dtypes = {
                "denoiser": dtype,
                "vae": torch.float32 if upcast else dtype,
                "num_iterations": torch.float32,
            }
            assign_weights(model, checkpoint, dtypes, device, progress=progress)
        recorded.fact("parameters", sum(parameter.numel() for parameter in model.parameters()))
        recorded.module("denoiser", model.denoiser)
        recorded.module("vae", model.vae)
    return model.eval()


class LbmVae(nn.Module):
    """Wraps diffusers' `AutoencoderKL` as `vae_model`, so that keys are `vae.vae_model.*`."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        self.config = config
        blocks = len(config.block_out_channels)
        self.vae_model = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * blocks,
            up_block_types=("UpDecoderBlock2D",) * blocks,
            **config.model_dump(),
        )

    @property
    def factor(self) -> int:
        """Image pixels along one side of a latent element."""
        return self.config.factor

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        dtype: torch.dtype = next(self.vae_model.parameters()).dtype
        return dtype

    def encode(
        self,
        images: Images,
        *,
        sample: bool = False,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        tile_size: int | None = None,
    ) -> Latents:
        """Encode images to latents, (z − shift)·scaling.

        Args:
            images: In [-1, 1], height and width multiples of `factor`.
            sample: Draw z from the posterior; otherwise take its mode, so that the result is the same each time.
            generator: Generator of that draw, on the CPU or on the images' device. With one for each image, an image's
                draw does not depend on the others.
            tile_size: Encode in overlapping tiles of this many pixels; None for no tiles.
        """
        images = images.to(self.dtype)
        if tile_size is None:
            moments = self._moments(images)
        else:
            tiles = self._tiles(images.shape[-2:], tile_size)
            moments = tiled_map(self._moments, images, tiles, modules=(self.vae_model,))
        mean, log_variance = moments.chunk(2, dim=1)
        latents = mean
        if sample:
            std = torch.exp(0.5 * log_variance.clamp(-30.0, 20.0))
            latents = mean + std * _normal_like(mean, generator)
        return (latents - self.config.shift_factor) * self.config.scaling_factor

    def decode(self, latents: Latents, *, tile_size: int | None = None) -> Images:
        """Decode latents to images: the inverse of `encode`'s shift and scaling, then the decoder.

        Args:
            latents: As `encode` gives them.
            tile_size: Decode in overlapping tiles of this many image pixels; None for no tiles.
        """
        latents = latents.to(self.dtype) / self.config.scaling_factor + self.config.shift_factor
        if tile_size is None:
            return self._pixels(latents)
        height, width = (side * self.factor for side in latents.shape[-2:])
        tiles = self._tiles((height, width), tile_size)
        return tiled_map(self._pixels, latents, tiles, modules=(self.vae_model,))

    def _tiles(self, size: Sequence[int], tile_size: int) -> TilePlan:
        tile = max(tile_size // self.factor, 2) * self.factor
        return plan(size[0], size[1], tile, None, self.factor)

    def _moments(self, images: Tensor) -> Tensor:
        encoded: Tensor = self.vae_model.encoder(images)
        quant_conv = self.vae_model.quant_conv
        return encoded if quant_conv is None else quant_conv(encoded)

    def _pixels(self, latents: Tensor) -> Tensor:
        decoded: Tensor = self.vae_model.decode(latents, return_dict=False)[0]
        return decoded


def _normal_like(mean: Latents, generator: torch.Generator | Sequence[torch.Generator] | None) -> Latents:
    """Standard normal noise of the shape, dtype and device of `mean`."""
    if isinstance(generator, Sequence):
        shape = mean.shape[1:]
        noise = torch.stack(
            [torch.randn(shape, generator=source, device=source.device) for source in generator]
        )
    else:
        device = mean.device if generator is None else generator.device
        noise = torch.randn(mean.shape, generator=generator, device=device)
    return noise.to(mean)


def assign_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    dtypes: Mapping[str, torch.dtype],
    device: str | torch.device,
    *,
    left_out: Container[str] = (),
    progress: Progress = no_progress,
) -> None:
    """Give every parameter and buffer of a model on the meta device its tensor from a checkpoint.

    Args:
        model: Its keys and shapes must be the checkpoint's.
        checkpoint: Open; tensors are read one at a time.
        dtypes: For each first part of a key ("denoiser", "vae", ...), the dtype that its tensors get.
        device: Where the tensors go.
        left_out: Keys that stay as they are.
        progress: Told after each tensor.

    Raises:
        ModelMismatchError: Keys are missing or unexpected, or shapes differ. Nothing was assigned.
        CheckpointError: A tensor cannot be read, or is not of a floating-point dtype.
        NonFiniteError: A tensor holds NaN or Inf.
    """
    expected = model.state_dict(keep_vars=True)
    check_fits(expected, checkpoint)
    for done, (key, placeholder) in enumerate(expected.items(), start=1):
        if key in left_out:
            continue
        tensor = checkpoint.tensor(key)
        if not tensor.is_floating_point():
            raise CheckpointError(
                checkpoint.path,
                f"{key} holds {tensor.dtype}, expected a floating-point dtype.",
                hint="Convert quantised weights to bf16 first.",
            )
        if not is_finite(tensor):
            raise NonFiniteError(
                f"{checkpoint.path}: {key} holds NaN or Inf.",
                hint="The checkpoint is damaged; download or save it again.",
            )
        tensor = tensor.to(device=device, dtype=dtypes[key.partition(".")[0]])
        owner, _, name = key.rpartition(".")
        is_parameter = isinstance(placeholder, nn.Parameter)
        setattr(model.get_submodule(owner), name, nn.Parameter(tensor) if is_parameter else tensor)
        progress(done, len(expected), key)


def check_fits(expected: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """Compare a model's state with a checkpoint's header: no tensor is read.

    Raises:
        ModelMismatchError: Keys are missing or unexpected, or shapes differ.
    """
    wrong = []
    missing, unexpected = compare_keys(expected, checkpoint)
    if missing:
        wrong.append(f"{len(missing)} missing: {listed(missing)}")
    if unexpected:
        wrong.append(f"{len(unexpected)} unexpected: {listed(unexpected)}")
    misshaped = [
        f"{key} (expected {list(tensor.shape)}, found {list(checkpoint.info(key).shape)})"
        for key, tensor in expected.items()
        if key in checkpoint and tuple(checkpoint.info(key).shape) != tuple(tensor.shape)
    ]
    if misshaped:
        wrong.append(f"{len(misshaped)} of another shape: {listed(misshaped)}")
    if wrong:
        raise ModelMismatchError(
            f"{checkpoint.path}: the weights do not fit the model that the config describes; {'; '.join(wrong)}.",
            hint="Pass the config that this checkpoint was made with (--config_path, or the model's keys in a training's "
            "YAML).",
        )


def compare_keys(expected: Mapping[str, Tensor], checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """Return the keys that a checkpoint lacks (missing), and those that the model's state lacks (unexpected)."""
    missing = [key for key in expected if key not in checkpoint]
    return missing, sorted(key for key in checkpoint if key not in expected)


def listed(names: Sequence[str], most: int = NAMED) -> str:
    """The first few names, and how many there are beyond them."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or Inf, from one pass over its smallest and largest (`aminmax` keeps NaN)."""
    if tensor.numel() == 0:
        return True
    lowest, highest = torch.aminmax(tensor if tensor.element_size() > 1 else tensor.float())
    return bool(torch.isfinite(lowest) & torch.isfinite(highest))
