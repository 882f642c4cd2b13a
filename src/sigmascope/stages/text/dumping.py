"""Save conditionings for comparison. What writes is handed in: stages themselves touch no files."""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from sigmascope.stages.host_reading import read_host
from sigmascope.stages.text.prompt_facts import as_text
from sigmascope.stages.text.typed import ConditioningDict


@runtime_checkable
class DumpFolder(Protocol):
    """What keeps tensors by name, such as `sigmascope.TensorDumps`."""

    def save(self, name: str, tensors: Any, *, prompt: Any, encoder: str | None, **metadata: Any) -> Path:
        """Write tensors of any nesting and give the file."""
        ...


def dump_conditioning(
    dumps: DumpFolder, name: str, conditioning: object, facts: ConditioningDict, prompt: object
) -> None:
    """Save one conditioning and note in its facts where, or why it was not saved."""
    if facts["status"] != "success":
        facts["unavailable"]["tensor_dump"] = facts["unavailable"]["shape"]
        return
    family, variant = facts["encoder_family"], facts["clip_variant"]
    text = prompt if as_text(prompt) is not None else None
    saved = read_host(
        lambda: dumps.save(name, conditioning, prompt=text, encoder=family, clip_variant=variant)
    )
    if saved.value is None:
        facts["unavailable"]["tensor_dump"] = saved.reason or "nothing was written"
    else:
        facts["tensor_dump"] = str(saved.value)
