"""Decode latents with any VAE, in whichever way memory allows: the engine of `encode_latents` the other way."""

from collections.abc import Iterable

import torch
from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.pipeline.choices import check_tiles, checked
from sigmascope.pipeline.engine import Engine, OnEvent
from sigmascope.pipeline.forecast import forecast_from
from sigmascope.pipeline.samples import sample_facts
from sigmascope.pipeline.turns import in_turn
from sigmascope.pipeline.vaes.adapter import Vae, adapted
from sigmascope.pipeline.work import Decoding
from sigmascope.records.latents import EncodingRecord, Layout, SampleFacts
from sigmascope.records.run import Run

_CHANNELS_FIRST: dict[int, Layout] = {4: "BCHW", 5: "BCFHW"}
_CHANNELS_LAST: dict[int, Layout] = {4: "BHWC", 5: "BFHWC"}


def decode_latents(
    vae: object,
    latents: Tensor,
    *,
    strategies: str | Iterable[str] = ("direct", "tiled", "cpu"),
    tile: int | None = None,
    overlap: int | None = None,
    output_device: torch.device | str | None = None,
    predict: bool = True,
    past: Iterable[Run | EncodingRecord] = (),
    on_event: OnEvent | None = None,
) -> tuple[Tensor, EncodingRecord]:
    """Decode with the first strategy that does not run out of memory.

    Args:
        vae: A VAE of diffusers or ComfyUI, a pipeline that has one, or any object with `decode`.
        latents: The VAE's own, neither scaled nor shifted: (batch, channels, height, width), or
            (batch, channels, frames, height, width) with frames and channels in either order.
        strategies: As in `encode_latents`, without "dummy".
        tile: Side of a tile in pixels of the pictures to come; None as in `encode_latents`.
        overlap: What tiles share, in such pixels; None is a quarter of a tile.
        output_device: Where the pictures shall be; None: where the VAE computes.
        predict: Foretell the peak of each attempt, as in `encode_latents`.
        past: Runs or records from which the predictions learn, beside the run that is being recorded.
        on_event: Called with an `EncodingEvent` at each beginning and end. What it raises is logged.

    Returns:
        The pictures as this VAE gives them, and the record of all attempts: [-1, 1] with channels first
        from diffusers, [0, 1] with channels last from ComfyUI.

    Raises:
        EveryStrategyFailedError: Memory ran out in all of them; `record` says how each ended.
        ConfigError: Latents, sizes or options that make no sense.
        ModelMismatchError: The VAE's results do not fit each other or are no tensors.
        Exception: Whatever the VAE raises that is not about memory, unchanged.
    """
    with in_turn(vae):
        choices = checked(strategies, tile, overlap, dummy=False, decodes=True)
        adapter = adapted(vae)
        device = None if output_device is None else torch.device(output_device)
        work = Decoding(adapter, _with_frames(latents, adapter), device)
        check_tiles(choices, work)
        given = sample_facts(latents, _CHANNELS_FIRST.get(latents.ndim))
        layouts = _CHANNELS_LAST if adapter.values == "unit" else _CHANNELS_FIRST

        def frame_facts(frames: Tensor) -> SampleFacts:
            return sample_facts(frames, layouts.get(frames.ndim))

        forecast = forecast_from(past, enabled=predict)
        return Engine(work, choices, given, frame_facts, forecast, on_event).run()


def _with_frames(latents: Tensor, vae: Vae) -> Tensor:
    """The latents as the VAE takes them: a picture of a VAE of videos is a video of one frame.

    Raises:
        ConfigError: They are packed or empty.
    """
    facts = vae.facts
    if latents.ndim not in (4, 5) or latents.numel() == 0:
        raise ConfigError(
            f"latents: a tensor of shape {tuple(latents.shape)} is neither (batch, channels, height, width) nor a "
            "video of such.",
            hint="Unpack packed latents first, as the pipeline does before it decodes.",
        )
    if latents.ndim == 5 and latents.shape[1] != facts.latent_channels == latents.shape[2]:
        latents = latents.movedim(2, 1)
    return latents.unsqueeze(2) if facts.is_video and latents.ndim == 4 else latents
