"""What is known before a text encoding, and what of it the analysis needs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from sigmascope.probes import Accelerator, memory_snapshot
from sigmascope.records.snapshot import MemorySnapshot
from sigmascope.stages.host_reading import read_host
from sigmascope.stages.memory_now import memory_now
from sigmascope.stages.model_state import changes, model_state, reference_to
from sigmascope.stages.text.encoders import EncoderFacts
from sigmascope.stages.text.live_encoders import find_encoders, find_tokenizers, named_tokenizers
from sigmascope.stages.text.typed import TextEncodingBaseline
from sigmascope.stages.typed import ModelStateDict

NO_BASELINE = "there is no baseline"


@dataclass(frozen=True, slots=True)
class References:
    """What a baseline keeps for the analysis. Models are referred to weakly; tokenizers are held."""

    snapshot: MemorySnapshot
    clip: Any
    unet: Any
    tokenizers: Mapping[str, Any]
    encoders: tuple[EncoderFacts, ...]
    accelerator: Accelerator | None

    def __repr__(self) -> str:
        return "References(…)"


def capture(
    unet: object, clip: object, tokenizer: object, accelerator: Accelerator | None
) -> TextEncodingBaseline:
    """See `sigmascope.stages.text_encoding.capture_text_encoding_baseline`."""
    encoders = tuple(read_host(lambda: find_encoders(clip)).value or ())
    tokenizers = read_host(lambda: _tokenizers(clip, tokenizer)).value or {}
    clip_state, unet_state = model_state(clip), model_state(unet)
    snapshot = memory_snapshot(accelerator)
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "memory": memory_now(snapshot),
        "clip": clip_state,
        "unet": unet_state,
        "tokenizers": {name: type(one).__name__ for name, one in tokenizers.items()},
        "encoders": [asdict(encoder) for encoder in encoders],
        "references": References(
            snapshot, reference_to(clip), reference_to(unet), tokenizers, encoders, accelerator
        ),
    }


def _tokenizers(clip: object, given: object) -> dict[str, Any]:
    if given is not None:
        return named_tokenizers(given)
    return find_tokenizers(clip) or named_tokenizers(getattr(clip, "tokenizer", None))


def references_of(baseline: Mapping[str, Any] | None) -> References | None:
    """What `capture` kept; None for a baseline that is not ours or was read from a file."""
    references = None if baseline is None else baseline.get("references")
    return references if isinstance(references, References) else None


def state_now(
    baseline: Mapping[str, Any] | None, references: References | None, which: str
) -> ModelStateDict:
    """The state of `clip` or `unet` now, with what changed since the baseline."""
    reference = getattr(references, which, None)
    model = None if reference is None else reference()
    state = model_state(model)
    if baseline is None or references is None:
        state["unavailable"] = dict.fromkeys(state["unavailable"], NO_BASELINE)
        return state
    before: ModelStateDict = baseline[which]
    if model is None:
        gone = before["model_id"] is not None
        reason = "the model is gone, or takes no weak reference" if gone else "no model was given"
        state["unavailable"] = dict.fromkeys(state["unavailable"], reason)
    else:
        state["changed"] = changes(before, state)
    return state
