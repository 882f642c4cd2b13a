"""Encode pictures and videos with any VAE, in whichever way memory allows (SPEC section 5)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from sigmascope.pipeline.choices import check_tiles, checked
from sigmascope.pipeline.dummy import FINDING, dummy_latents
from sigmascope.pipeline.engine import Engine, OnEvent
from sigmascope.pipeline.forecast import forecast_from
from sigmascope.pipeline.samples import sample_facts
from sigmascope.pipeline.strategies import Outcome
from sigmascope.pipeline.turns import in_turn
from sigmascope.pipeline.vaes.adapter import adapted
from sigmascope.pipeline.vaes.pictures import pictures
from sigmascope.pipeline.vaes.values import Values
from sigmascope.pipeline.work import Encoding
from sigmascope.records.latents import EncodingRecord, Layout, SampleFacts
from sigmascope.records.run import Run


def encode_latents(
    vae: object,
    frames: object,
    *,
    strategies: str | Iterable[str] = ("direct", "tiled", "cpu"),
    tile: int | None = None,
    overlap: int | None = None,
    layout: Layout | None = None,
    values: Values | None = None,
    sample: bool = False,
    generator: torch.Generator | None = None,
    output_device: torch.device | str | None = None,
    dummy: bool = False,
    predict: bool = True,
    past: Iterable[Run | EncodingRecord] = (),
    on_event: OnEvent | None = None,
) -> tuple[Tensor, EncodingRecord]:
    """Encode with the first strategy that does not run out of memory.

    The latent is the VAE's own, neither scaled nor shifted: what `vae.encode(x).latent_dist.mode()` gives. The
    VAE is as before when this returns or raises: placement, dtype, modes, tiling and slicing, buffers.

    Args:
        vae: A VAE of diffusers or ComfyUI, a pipeline that has one, or any object with `encode`.
        frames: A tensor, an array or a PIL image, or a list of them, all of one size.
        strategies: In the order in which they are tried: "direct", "tiled", "cpu" (with the weights copied to
            RAM, in tiles if that cannot hold more), "dummy". "auto" takes the first three and passes over what is not
            expected to fit.
        tile: Side of a tile in pixels. None begins with 512, or half of a smaller picture, and halves it
            whenever memory runs out.
        overlap: What tiles share with their neighbours, in pixels; None is a quarter of a tile.
        layout: What each axis of `frames` is, such as "BFCHW"; None decides by where the VAE's channels are.
        values: What the numbers mean: "bytes" 0 to 255, "unit" [0, 1], "signed" [-1, 1]. None: bytes for uint8;
            for floats "unit" with channels last or with ComfyUI's VAE, else "signed".
        sample: Draw the latent from the VAE's distribution; otherwise take its mode.
        generator: Of that draw. A failed attempt leaves its state as it was.
        output_device: Where the latent shall be; None: where the VAE computes, whatever the strategy.
        dummy: Where all else fails, give zeros of the right shape. They are no encoding, and the record says so.
        predict: Foretell the peak of each attempt, which takes a part of a second the first time for each VAE
            and size. Without it "auto" takes everything to fit, and the CPU is refused for the weights alone.
        past: Runs or records from which the predictions learn, beside the run that is being recorded.
        on_event: Called with an `EncodingEvent` at each beginning and end. What it raises is logged.

    Returns:
        The latent (batch, channels, height, width), or (batch, channels, frames, height, width) of a video, and
        the record of all attempts.

    Raises:
        EveryStrategyFailedError: Memory ran out in all of them; `record` says how each ended.
        ConfigError: Pictures, sizes or options that make no sense.
        ModelMismatchError: The VAE's results do not fit each other or are no tensors.
        Exception: Whatever the VAE raises that is not about memory, unchanged.
    """
    with in_turn(vae):
        choices = checked(strategies, tile, overlap, dummy=dummy, decodes=False)
        adapter = adapted(vae)
        given = pictures(
            frames,
            adapter.facts,
            layout=layout,
            values=values,
            default_values=adapter.default_values,
            one_each=adapter.one_each,
        )
        device = None if output_device is None else torch.device(output_device)
        work = Encoding(adapter, given, sample, generator, device)
        check_tiles(choices, work)

        def stand_in() -> Outcome:
            return Outcome(dummy_latents(adapter, given, device or adapter.home))

        forecast = forecast_from(past, enabled=predict)
        engine = Engine(work, choices, given.facts, _latent_facts, forecast, on_event, stand_in, FINDING)
        return engine.run()


def _latent_facts(latent: Tensor) -> SampleFacts:
    layouts: dict[int, Layout] = {4: "BCHW", 5: "BCFHW"}
    return sample_facts(latent, layouts.get(latent.ndim))
