"""What is known before an encoding or decoding, and what of it the analysis needs."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from sigmascope.probes import Accelerator, memory_snapshot
from sigmascope.records.latents import Direction, Layout, VaeFacts
from sigmascope.records.snapshot import MemorySnapshot
from sigmascope.stages.host_reading import read_host
from sigmascope.stages.latents.expected import Video
from sigmascope.stages.latents.finding_latent import find_latent
from sigmascope.stages.latents.judging import Judged, judge
from sigmascope.stages.latents.latent_facts import latent_analysis, no_latent
from sigmascope.stages.latents.memory import figure_of, snapshot_of
from sigmascope.stages.latents.pictures import read_pictures
from sigmascope.stages.latents.plain import pictures_dict, vae_dict
from sigmascope.stages.latents.typed import LatentAnalysis, LatentBaseline, PicturesDict
from sigmascope.stages.latents.vae_facts import inner_vae, vae_facts
from sigmascope.stages.memory_now import memory_now
from sigmascope.stages.model_state import changes, model_state, reference_to
from sigmascope.stages.typed import ModelStateDict

NO_BASELINE = "there is no baseline"
_VAE_FIELDS = tuple(field.name for field in fields(VaeFacts) if field.name != "nbytes")


@dataclass(frozen=True, slots=True)
class References:
    """What a baseline keeps for the analysis: the VAE weakly, of tensors only facts."""

    snapshot: MemorySnapshot
    vae: Any
    accelerator: Accelerator | None
    latent: Judged | None = None

    def __repr__(self) -> str:
        return "References(…)"


def capture_pictures(
    vae: object, pictures: object, statistics: bool | None, accelerator: Accelerator | None
) -> LatentBaseline:
    """See `sigmascope.stages.latent_encoding.capture_latent_generation_baseline`. Never raises."""
    facts = vae_facts(vae)
    read = pictures_dict(read_pictures(pictures, facts, statistics))
    return _baseline(vae, facts, "encoding", accelerator, pictures=read)


def capture_latent(
    vae: object,
    latent: object,
    video: Video,
    layout: Layout | None,
    statistics: bool | None,
    accelerator: Accelerator | None,
) -> LatentBaseline:
    """See `sigmascope.stages.latent_decoding.capture_latent_decoding_baseline`. Never raises."""
    facts, found = vae_facts(vae), find_latent(latent)
    judged = None if found.tensor is None else judge(found.tensor, facts, video, layout, statistics)
    analysis = no_latent(found) if judged is None else latent_analysis(judged, found.structure, facts, video)
    return _baseline(vae, facts, "decoding", accelerator, latent=analysis, judged=judged)


def _baseline(
    vae: object,
    facts: VaeFacts,
    direction: Direction,
    accelerator: Accelerator | None,
    *,
    pictures: PicturesDict | None = None,
    latent: LatentAnalysis | None = None,
    judged: Judged | None = None,
) -> LatentBaseline:
    inner = read_host(lambda: inner_vae(vae)).value or vae
    state = model_state(inner)
    snapshot = memory_snapshot(accelerator)
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "direction": direction,
        "memory": memory_now(snapshot),
        "vae": vae_dict(facts),
        "model_state": state,
        "pictures": pictures,
        "latent": latent,
        "references": References(snapshot, reference_to(inner), accelerator, judged),
    }


def snapshot_before(baseline: Mapping[str, Any] | None) -> MemorySnapshot | None:
    """Memory before, also from a baseline that was read from a file."""
    known = references_of(baseline)
    if known is not None:
        return known.snapshot
    memory = None if baseline is None else baseline.get("memory")
    return snapshot_of(memory) if isinstance(memory, Mapping) else None


def vae_before(baseline: Mapping[str, Any] | None) -> VaeFacts | None:
    """The facts of the VAE that a baseline holds."""
    told = None if baseline is None else baseline.get("vae")
    if not isinstance(told, Mapping):
        return None
    nbytes = figure_of(told, "size")
    return VaeFacts(**{name: told[name] for name in _VAE_FIELDS if name in told}, nbytes=nbytes)


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
