"""Facts of a VAE and of pictures as baselines and analyses hold them."""

from typing import Any

from sigmascope.records.arithmetic import mib
from sigmascope.records.latents import VaeFacts
from sigmascope.stages.latents.pictures import Pictures
from sigmascope.stages.latents.typed import PicturesDict, VaeDict


def vae_dict(facts: VaeFacts) -> VaeDict:
    """The VAE's facts as an analysis holds them."""
    return {
        "class_name": facts.class_name,
        "latent_channels": facts.latent_channels,
        "image_channels": facts.image_channels,
        "spatial_factor": facts.spatial_factor,
        "temporal_factor": facts.temporal_factor,
        "first_frame_apart": facts.first_frame_apart,
        "is_video": facts.is_video,
        "dtype": facts.dtype,
        "device": facts.device,
        "size_mb": mib(facts.nbytes),
        "source": facts.source,
        "unavailable": dict(facts.unavailable),
    }


def pictures_dict(pictures: Pictures) -> PicturesDict:
    """The pictures' facts as an analysis holds them."""
    facts = pictures.facts
    if facts is None:
        names = set(PicturesDict.__annotations__) - {"sizes", "unavailable"}
        nothing: dict[str, Any] = dict.fromkeys(names)
        reasons = dict.fromkeys(names, pictures.reason or "unknown")
        return {**nothing, "sizes": [], "unavailable": reasons}  # type: ignore[typeddict-item]
    tensor = facts.tensor
    return {
        "form": facts.form,
        "layout": facts.layout,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "size_mb": mib(tensor.nbytes),
        "batch_size": facts.batch,
        "length": pictures.length,
        "channels": facts.channels,
        "height": facts.height,
        "width": facts.width,
        "sizes": [list(size) for size in pictures.sizes],
        "min": tensor.min,
        "max": tensor.max,
        "nan_count": tensor.nan_count,
        "inf_count": tensor.inf_count,
        "unavailable": {**tensor.unavailable, **facts.unavailable},
    }
