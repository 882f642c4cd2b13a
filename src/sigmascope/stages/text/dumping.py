"""Save conditionings for comparison. What writes is handed in: stages themselves touch no files.

Tensors are named by what they are and not by where they were, so that dumps of two pipelines have the same names,
whatever each nests its conditionings in.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from sigmascope.stages.host_reading import read_host
from sigmascope.stages.text.conditioning import Found
from sigmascope.stages.text.conditioning_entry import Entry
from sigmascope.stages.text.prompt_facts import as_text
from sigmascope.stages.text.typed import ConditioningDict


@runtime_checkable
class DumpFolder(Protocol):
    """What keeps tensors by name, such as `sigmascope.TensorDumps`."""

    def save(self, name: str, tensors: Any, *, prompt: Any, encoder: str | None, **metadata: Any) -> Path:
        """Write tensors of any nesting and give the file."""
        ...


def dump_conditioning(
    dumps: DumpFolder, name: str, found: Found, facts: ConditioningDict, prompt: object
) -> None:
    """Save one conditioning and note in its facts where, or why it was not saved."""
    if facts["status"] != "success":
        facts["unavailable"]["tensor_dump"] = facts["unavailable"]["shape"]
        return
    saved = read_host(
        lambda: dumps.save(
            name,
            tensors_by_name(found),
            prompt=prompt if as_text(prompt) is not None else None,
            encoder=facts["encoder_family"],
            clip_variant=facts["clip_variant"],
            structure=found.structure,
            entries=[dict(entry.metadata) for entry in found.entries],
        )
    )
    if saved.value is None:
        facts["unavailable"]["tensor_dump"] = saved.reason or "nothing was written"
    else:
        facts["tensor_dump"] = str(saved.value)


def tensors_by_name(found: Found) -> dict[str, Tensor]:
    """`embeddings`, `pooled`, `attention_mask` and `other.…`; those of a second entry begin with `entry_2.`, and so on."""
    named: dict[str, Tensor] = {}
    for number, entry in enumerate(found.entries, 1):
        prefix = "" if number == 1 else f"entry_{number}."
        named |= {f"{prefix}{name}": tensor for name, tensor in _parts(entry).items() if tensor is not None}
    return named


def _parts(entry: Entry) -> Mapping[str, Tensor | None]:
    others = {f"other.{name}": tensor for name, tensor in entry.others.items()}
    known = {
        "embeddings": entry.tensor,
        "pooled": entry.pooled,
        "attention_mask": entry.attention_mask,
    }
    return {**known, **others}
