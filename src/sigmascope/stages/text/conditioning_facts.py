"""A conditioning as the dict of SPEC section 4."""

from collections.abc import Sequence

from torch import Tensor

from sigmascope.probes import tensor_facts
from sigmascope.records.arithmetic import MIB
from sigmascope.stages.host_reading import read_host
from sigmascope.stages.text.conditioning import Found, find_conditioning
from sigmascope.stages.text.conditioning_entry import Entry
from sigmascope.stages.text.encoders import EncoderFacts, identify
from sigmascope.stages.text.typed import ConditioningDict, EntryDict, TensorDict

_FACTS = ("shape", "dtype", "device", "size_mb", "num_elements", "statistics")


def read_conditioning(conditioning: object) -> tuple[Found, str | None]:
    """The tensors of a conditioning, or none and why it could not be read. Never raises."""
    reading = read_host(lambda: find_conditioning(conditioning))
    return reading.value or Found(type(conditioning).__name__), reading.reason


def conditioning_facts(
    found: Found, encoders: Sequence[EncoderFacts], statistics: bool | None, reason: str | None = None
) -> ConditioningDict:
    """Everything that is known of one conditioning.

    Args:
        found: Its tensors.
        encoders: The live encoders that may have made it.
        statistics: As in `probes.tensor_facts`: None reads values of CPU tensors only.
        reason: Why it could not be read, if it could not.
    """
    entries = [_entry_dict(entry, statistics) for entry in found.entries]
    index = next((i for i, entry in enumerate(entries) if entry["tensor"] is not None), None)
    if index is None:
        return _nothing(found, entries, reason)
    main, entry = entries[index]["tensor"], entries[index]
    assert main is not None
    shape = main["shape"]
    encoder = identify(shape, encoders)
    return {
        "status": "success",
        "structure": found.structure,
        "shape": shape,
        "dtype": main["dtype"],
        "device": main["device"],
        "size_mb": main["size_mb"],
        "num_elements": main["num_elements"],
        "sequence_length": shape[-2] if len(shape) >= 2 else None,
        "clip_variant": encoder["clip_variant"],
        "encoder_family": encoder["family"],
        "encoder": encoder,
        "pooled": entry["pooled"],
        "attention_mask": entry["attention_mask"],
        "metadata": entry["metadata"],
        "entries": entries,
        "total_size_mb": sum(tensor["size_mb"] for one in entries for tensor in tensors_of(one)),
        "statistics": main["statistics"],
        "tensor_dump": None,
        "unavailable": dict(main["unavailable"]),
    }


def tensors_of(entry: EntryDict) -> list[TensorDict]:
    """Every tensor of an entry."""
    parts = (entry["tensor"], entry["pooled"], entry["attention_mask"], *entry["others"].values())
    return [part for part in parts if part is not None]


def _entry_dict(entry: Entry, statistics: bool | None) -> EntryDict:
    return {
        "tensor": _tensor_or_none(entry.tensor, statistics),
        "pooled": _tensor_or_none(entry.pooled, statistics),
        "attention_mask": _tensor_or_none(entry.attention_mask, statistics),
        "others": {name: _tensor_dict(tensor, statistics) for name, tensor in entry.others.items()},
        "metadata": dict(entry.metadata),
    }


def _tensor_or_none(tensor: Tensor | None, statistics: bool | None) -> TensorDict | None:
    return None if tensor is None else _tensor_dict(tensor, statistics)


def _tensor_dict(tensor: Tensor, statistics: bool | None) -> TensorDict:
    facts = tensor_facts(tensor, statistics=statistics)
    return {
        "shape": list(facts.shape),
        "dtype": facts.dtype,
        "device": facts.device,
        "size_mb": facts.nbytes / MIB,
        "num_elements": facts.num_elements,
        "statistics": {
            "min": facts.min,
            "max": facts.max,
            "mean": facts.mean,
            "std": facts.std,
            "nan_count": facts.nan_count,
            "inf_count": facts.inf_count,
        },
        "unavailable": dict(facts.unavailable),
    }


def _nothing(found: Found, entries: list[EntryDict], reason: str | None) -> ConditioningDict:
    if reason is not None:
        status, why = "failed", reason
    elif found.structure == "none":
        status, why = "missing", "no conditioning was given"
    else:
        status, why = "no_tensor", _why_none(found, entries)
    names = ("clip_variant", "encoder_family", "encoder", "pooled", "attention_mask", "total_size_mb")
    return {
        "status": status,
        "structure": found.structure,
        "shape": None,
        "dtype": None,
        "device": None,
        "size_mb": None,
        "num_elements": None,
        "sequence_length": None,
        "clip_variant": None,
        "encoder_family": None,
        "encoder": None,
        "pooled": None,
        "attention_mask": None,
        "metadata": {},
        "entries": entries,
        "total_size_mb": None,
        "statistics": None,
        "tensor_dump": None,
        "unavailable": dict.fromkeys((*_FACTS, "sequence_length", *names), why),
    }


def _why_none(found: Found, entries: list[EntryDict]) -> str:
    others = [tensor for entry in entries for tensor in tensors_of(entry)]
    if not others:
        return f"no tensor was found in it ({found.structure})"
    shown = ", ".join(f"{tuple(tensor['shape'])} {tensor['dtype']}" for tensor in others[:3])
    return f"no embeddings were found in it, but {shown}{', …' if len(others) > 3 else ''}"
