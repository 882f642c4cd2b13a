"""A conditioning's tensors, whatever they are nested in, and all that is known of them.

Known forms: a bare tensor or array; ComfyUI's `[[tensor, {…}], …]`, where regional and scheduled prompts are
several entries; what diffusers' `encode_prompt` gives, whole or in part; transformers' outputs; any mapping,
dataclass, named tuple or list of these. Tensors that have a name are told apart by it, those without by their
shape: embeddings are (batch, tokens, width), a pooled output (batch, width), a mask is not floating.

Conditionings can be saved for comparison (`dump_conditioning`). Their tensors are then named by what they are
and not by where they were, so that dumps of two pipelines have the same names, whatever each nests its
conditionings in. What writes is handed in: stages themselves touch no files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from sigmascope.files import without_home
from sigmascope.probes.reading import node_outputs, read_host
from sigmascope.probes.tensors import Leaf, as_tensor, leaves_of, plain_values, tensor_facts
from sigmascope.stages.baseline import tensor_dict, unknown
from sigmascope.stages.prompt_facts import as_text
from sigmascope.stages.schema import ConditioningDict, EntryDict, TensorDict
from sigmascope.stages.text_encoders import EncoderFacts, identify

_MOST_LISTS = 8  # nested in each other around ComfyUI's pairs
MAIN_NAMES = (
    "prompt_embeds",
    "last_hidden_state",
    "encoder_hidden_states",
    "cond",
    "c_crossattn",
    "crossattn",
    "context",
    "conditioning",
    "embeddings",
    "embeds",
    "hidden_states",
)
"""What embeddings are called, best first."""
POOLED_NAMES = (
    "pooled_output",
    "pooled_prompt_embeds",
    "pooled_projections",
    "text_embeds",
    "pooler_output",
    "pooled",
    "vector",
    "y",
)
"""What pooled outputs are called, best first."""
MASK_NAMES = (
    "attention_mask",
    "prompt_embeds_mask",
    "prompt_attention_mask",
    "encoder_attention_mask",
    "encoder_hidden_states_mask",
)
"""What masks are called, best first."""
_OTHER_TEXT = "negative_"  # a tensor of that name is taken only where there is no other
_WIDEST_POSITION = 4  # FLUX's text ids are 3 wide


@dataclass(frozen=True, slots=True)
class Entry:
    """One conditioning: embeddings with what belongs to them. `metadata` has the plain values."""

    tensor: Tensor | None
    pooled: Tensor | None = None
    attention_mask: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conditioning:
    """All entries, and in what they were: "tensor", "comfyui", "mapping", "sequence", "none" or a class."""

    structure: str
    entries: tuple[Entry, ...] = ()

    @property
    def first(self) -> Entry:
        """The first entry with embeddings; an empty one if there is none."""
        return next((entry for entry in self.entries if entry.tensor is not None), Entry(None))


def read_conditioning(conditioning: object) -> tuple[Conditioning, str | None]:
    """The tensors of a conditioning, or none and why it could not be read. Never raises."""
    reading = read_host(lambda: find_conditioning(conditioning))
    return reading.value or Conditioning(type(conditioning).__name__), reading.reason


def find_conditioning(conditioning: object) -> Conditioning:
    """The tensors of a conditioning, by entry. Nothing is copied or moved.

    Raises:
        RecursionError, RuntimeError, TypeError, ValueError, AttributeError: Its own code fails when read.
    """
    conditioning = node_outputs(conditioning)
    if conditioning is None:
        return Conditioning("none")
    pairs = _comfyui_pairs(conditioning)
    if pairs is not None:
        return Conditioning("comfyui", tuple(_comfyui_entry(*pair) for pair in pairs))
    leaves = list(leaves_of(conditioning))
    structure = _structure(conditioning)
    if not leaves:
        return Conditioning(structure)
    if structure == "sequence" and len(leaves) > 1 and _is_one_text_an_item(leaves, conditioning):
        return Conditioning(structure, tuple(Entry(leaf.tensor) for leaf in leaves))
    return Conditioning(structure, (entry_of(leaves, plain_values(conditioning)),))


def _comfyui_pairs(conditioning: object, depth: int = 0) -> list[tuple[Any, Mapping[Any, Any]]] | None:
    """The `[tensor, {…}]` pairs of ComfyUI's list, of a single such pair, or of lists of these; None if it is other."""
    if depth > _MOST_LISTS or not isinstance(conditioning, list | tuple) or not conditioning:
        return None
    if _is_pair(conditioning):
        return [(conditioning[0], conditioning[1])]
    pairs: list[tuple[Any, Mapping[Any, Any]]] = []
    for item in conditioning:
        inner = _comfyui_pairs(item, depth + 1)
        if inner is None:
            return None
        pairs += inner
    return pairs


def _is_pair(item: object) -> bool:
    return (
        isinstance(item, list | tuple)
        and len(item) == 2
        and isinstance(item[0], Tensor | np.ndarray | None)
        and isinstance(item[1], Mapping)
    )


def _comfyui_entry(tensor: object, options: Mapping[Any, Any]) -> Entry:
    beside = entry_of(list(leaves_of(options)), plain_values(options), named_only=True)
    others = dict(beside.others)
    if beside.tensor is not None:  # in ComfyUI's options nothing is the conditioning itself
        others["embeddings"] = beside.tensor
    return Entry(as_tensor(tensor), beside.pooled, beside.attention_mask, others, beside.metadata)


def _structure(conditioning: object) -> str:
    if isinstance(conditioning, Tensor | np.ndarray):
        return "tensor"
    if isinstance(conditioning, Mapping):
        return "mapping"
    return "sequence" if isinstance(conditioning, list | tuple) else type(conditioning).__name__


def _is_one_text_an_item(leaves: list[Leaf], conditioning: object) -> bool:
    """A list with a (tokens, width) tensor for every prompt, as pipelines without padding give.

    In a tuple two of one shape are the prompt and the negative prompt.
    """
    tensors = [leaf.tensor for leaf in leaves]
    widths = {tensor.shape[-1] for tensor in tensors if tensor.ndim == 2}
    return (
        all(leaf.name == "" and leaf.tensor.ndim == 2 and leaf.tensor.is_floating_point() for leaf in leaves)
        and len(widths) == 1
        and (isinstance(conditioning, list) or len({tensor.shape[0] for tensor in tensors}) > 1)
    )


def entry_of(leaves: list[Leaf], metadata: Mapping[str, Any], *, named_only: bool = False) -> Entry:
    """Sort tensors by what they are, names first, then shapes.

    Args:
        leaves: All tensors of the conditioning.
        metadata: Its plain values.
        named_only: Whether tensors without a telling name are others, whatever their shape.
    """
    rest = list(leaves)
    main = _take_named(rest, MAIN_NAMES)
    pooled = _take_named(rest, POOLED_NAMES)
    mask = _take_named(rest, MASK_NAMES)
    if not named_only:
        main = main or _take(rest, _is_embedding) or _take(rest, _is_floating_matrix)
        if main is not None:
            pooled = pooled or _take(rest, lambda leaf: _is_pooled(leaf, main.tensor))
            mask = mask or _take(rest, lambda leaf: _is_mask(leaf, main.tensor))
    others = {_name_or_number(".".join(leaf.path), index): leaf.tensor for index, leaf in enumerate(rest)}
    return Entry(_tensor_of(main), _tensor_of(pooled), _tensor_of(mask), others, metadata)


def _take_named(rest: list[Leaf], names: tuple[str, ...]) -> Leaf | None:
    """Take the tensor with the first of these names; of several (all layers), the last one."""
    for name in names:
        named = [leaf for leaf in rest if leaf.name == name]
        if named:
            rest.remove(named[-1])
            return named[-1]
    return None


def _take(rest: list[Leaf], is_it: Callable[[Leaf], bool]) -> Leaf | None:
    candidates = [leaf for leaf in rest if is_it(leaf)]
    chosen = next((leaf for leaf in candidates if not leaf.name.startswith(_OTHER_TEXT)), None)
    chosen = chosen or next(iter(candidates), None)
    if chosen is not None:
        rest.remove(chosen)
    return chosen


def _is_embedding(leaf: Leaf) -> bool:
    return leaf.tensor.ndim >= 3 and leaf.tensor.is_floating_point()


def _is_floating_matrix(leaf: Leaf) -> bool:
    shape = leaf.tensor.shape
    return len(shape) in (1, 2) and leaf.tensor.is_floating_point() and shape[-1] > _WIDEST_POSITION


def _is_pooled(leaf: Leaf, main: Tensor) -> bool:
    """(batch, width) beside (batch, tokens, width); FLUX's text ids (tokens, 3) and masks (batch, tokens) are none."""
    shape = leaf.tensor.shape
    if not _is_floating_matrix(leaf) or main.ndim < 3 or _is_mask(leaf, main):
        return False
    return len(shape) == 1 or shape[0] == main.shape[0]


def _is_mask(leaf: Leaf, main: Tensor) -> bool:
    """(batch, tokens); one of floating numbers only where it cannot be as wide as the embeddings."""
    shape = leaf.tensor.shape
    if main.ndim < 2 or shape[-1:] != main.shape[-2:-1]:
        return False
    return not leaf.tensor.is_floating_point() or (len(shape) == 2 and shape[-1] != main.shape[-1])


def _name_or_number(name: str, index: int) -> str:
    return name or f"tensor_{index}"


def _tensor_of(leaf: Leaf | None) -> Tensor | None:
    return None if leaf is None else leaf.tensor


def conditioning_facts(
    conditioning: Conditioning,
    encoders: Sequence[EncoderFacts],
    statistics: bool | None,
    reason: str | None = None,
) -> ConditioningDict:
    """Everything that is known of one conditioning."""
    entries = [_entry_dict(entry, statistics) for entry in conditioning.entries]
    index = next((i for i, entry in enumerate(entries) if entry["tensor"] is not None), None)
    if index is None:
        return _without_tensor(conditioning, entries, reason)
    main, entry = entries[index]["tensor"], entries[index]
    assert main is not None
    shape = main["shape"]
    encoder = identify(shape, encoders)
    return {
        "status": "success",
        "structure": conditioning.structure,
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
        "total_size_mb": sum(tensor["size_mb"] for facts in entries for tensor in tensors_of(facts)),
        "statistics": main["statistics"],
        "tensor_dump": None,
        "unavailable": dict(main["unavailable"]),
    }


def _entry_dict(entry: Entry, statistics: bool | None) -> EntryDict:
    return {
        "tensor": _tensor_or_none(entry.tensor, statistics),
        "pooled": _tensor_or_none(entry.pooled, statistics),
        "attention_mask": _tensor_or_none(entry.attention_mask, statistics),
        "others": {
            name: tensor_dict(tensor_facts(tensor, statistics=statistics))
            for name, tensor in entry.others.items()
        },
        "metadata": dict(entry.metadata),
    }


def _tensor_or_none(tensor: Tensor | None, statistics: bool | None) -> TensorDict | None:
    return None if tensor is None else tensor_dict(tensor_facts(tensor, statistics=statistics))


def _without_tensor(
    conditioning: Conditioning, entries: list[EntryDict], reason: str | None
) -> ConditioningDict:
    if reason is not None:
        status, why = "failed", reason
    elif conditioning.structure == "none":
        status, why = "missing", "no conditioning was given"
    else:
        status, why = "no_tensor", _why_none(conditioning, entries)
    return unknown(
        ConditioningDict,
        why,
        status=status,
        structure=conditioning.structure,
        metadata={},
        entries=entries,
        tensor_dump=None,
    )


def _why_none(conditioning: Conditioning, entries: list[EntryDict]) -> str:
    others = [tensor for entry in entries for tensor in tensors_of(entry)]
    if not others:
        return f"no tensor was found in it ({conditioning.structure})"
    shown = ", ".join(f"{tuple(tensor['shape'])} {tensor['dtype']}" for tensor in others[:3])
    return f"no embeddings were found in it, but {shown}{', …' if len(others) > 3 else ''}"


def tensors_of(entry: EntryDict) -> list[TensorDict]:
    """Every tensor of an entry."""
    parts = (entry["tensor"], entry["pooled"], entry["attention_mask"], *entry["others"].values())
    return [part for part in parts if part is not None]


@runtime_checkable
class DumpFolder(Protocol):
    """What keeps tensors by name, such as `sigmascope.TensorDumps`."""

    def save(self, name: str, tensors: Any, *, prompt: Any, encoder: str | None, **metadata: Any) -> Path:
        """Write tensors of any nesting and give the file."""
        ...


def dump_conditioning(
    dumps: DumpFolder, name: str, conditioning: Conditioning, facts: ConditioningDict, prompt: object
) -> None:
    """Save one conditioning and note in its facts where, or why it was not saved."""
    if facts["status"] != "success":
        facts["unavailable"]["tensor_dump"] = facts["unavailable"]["shape"]
        return
    saved = read_host(
        lambda: dumps.save(
            name,
            tensors_by_name(conditioning),
            prompt=prompt if as_text(prompt) is not None else None,
            encoder=facts["encoder_family"],
            clip_variant=facts["clip_variant"],
            structure=conditioning.structure,
            entries=[dict(entry.metadata) for entry in conditioning.entries],
        )
    )
    if saved.value is None:
        facts["unavailable"]["tensor_dump"] = saved.reason or "nothing was written"
    else:
        facts["tensor_dump"] = without_home(str(saved.value))


def tensors_by_name(conditioning: Conditioning) -> dict[str, Tensor]:
    """`embeddings`, `pooled`, `attention_mask` and `other.…`; a second entry's begin with `entry_2.`, and so on."""
    named: dict[str, Tensor] = {}
    for number, entry in enumerate(conditioning.entries, 1):
        prefix = "" if number == 1 else f"entry_{number}."
        named |= {
            f"{prefix}{name}": tensor for name, tensor in _named_tensors(entry).items() if tensor is not None
        }
    return named


def _named_tensors(entry: Entry) -> Mapping[str, Tensor | None]:
    others = {f"other.{name}": tensor for name, tensor in entry.others.items()}
    known = {
        "embeddings": entry.tensor,
        "pooled": entry.pooled,
        "attention_mask": entry.attention_mask,
    }
    return {**known, **others}
