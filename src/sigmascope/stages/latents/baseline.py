"""What is known before an encoding or decoding, and what of it the analysis needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sigmascope.probes import Accelerator, memory_snapshot
from sigmascope.records.arithmetic import mib
from sigmascope.records.latents import Direction, VaeFacts
from sigmascope.records.snapshot import MemorySnapshot
from sigmascope.stages.host_reading import read_host
from sigmascope.stages.latents.expected import Video, video_of
from sigmascope.stages.latents.pictures import Pictures, read_pictures
from sigmascope.stages.latents.typed import LatentBaseline, PicturesDict, VaeDict
from sigmascope.stages.latents.vae_facts import inner_vae, vae_facts
from sigmascope.stages.memory_now import memory_now
from sigmascope.stages.model_state import changes, model_state, reference_to
from sigmascope.stages.typed import ModelStateDict

NO_BASELINE = "there is no baseline"


@dataclass(frozen=True, slots=True)
class References:
    """What a baseline keeps for the analysis. The VAE is referred to weakly, the pictures not at all."""

    snapshot: MemorySnapshot
    vae: Any
    vae_facts: VaeFacts
    pictures: Pictures
    accelerator: Accelerator | None

    def __repr__(self) -> str:
        return "References(…)"

    @property
    def video(self) -> Video:
        """Frames, height and width of the pictures that went in."""
        facts = self.pictures.facts
        if facts is None:
            return Video()
        return video_of(self.pictures.length, facts.height, facts.width)


def capture(
    vae: object,
    pictures: object,
    direction: Direction,
    statistics: bool | None,
    accelerator: Accelerator | None,
) -> LatentBaseline:
    """See `sigmascope.stages.latent_encoding.capture_latent_generation_baseline`. Never raises."""
    inner = read_host(lambda: inner_vae(vae)).value or vae
    facts = vae_facts(vae)
    read = read_pictures(pictures, facts, statistics)
    state = model_state(inner)
    snapshot = memory_snapshot(accelerator)
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "direction": direction,
        "memory": memory_now(snapshot),
        "vae": vae_dict(facts),
        "model_state": state,
        "pictures": pictures_dict(read),
        "references": References(snapshot, reference_to(inner), facts, read, accelerator),
    }


def references_of(baseline: Mapping[str, Any] | None) -> References | None:
    """What `capture` kept; None for a baseline that is not ours or was read from a file."""
    references = None if baseline is None else baseline.get("references")
    return references if isinstance(references, References) else None


def state_now(baseline: Mapping[str, Any] | None, known: References | None) -> ModelStateDict:
    """The VAE's state now, with what changed since the baseline."""
    live = None if known is None or known.vae is None else known.vae()
    state = model_state(live)
    before = None if baseline is None else baseline.get("model_state")
    if live is None and isinstance(before, Mapping) and before.get("class_type"):
        state["unavailable"] = dict.fromkeys(state["unavailable"], "the VAE is gone")
    if live is not None and isinstance(before, Mapping):
        state["changed"] = changes(before, state)  # type: ignore[arg-type]
    return state


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
