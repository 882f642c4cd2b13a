"""What a dump's header says of its tensors: where they come from, and what was around them.

Each field is one text of the safetensors header; those that are more than a text are JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from sigmascope.errors import CheckpointError
from sigmascope.records import plain_json
from sigmascope.records.prompts import PromptPrivacy, StoredPrompt, check_privacy

SCHEMA_KEY = "sigmascope_dump"
SCHEMA = "1"
_JSON_FIELDS = ("prompt", "tensors", "conditioning", "metadata")


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor as it was when it was saved; `device` is where it lay then."""

    shape: tuple[int, ...]
    dtype: str
    device: str | None = None


@dataclass(frozen=True, slots=True)
class DumpMetadata:
    """The header of a dump. Of a safetensors file that is no dump, `header` alone is filled.

    Attributes:
        tensors: Shape, dtype and device by name, as saved.
        run_id: The run that the tensors belong to.
        encoder: What made them, such as `CLIP-L`.
        prompts: What is kept of the prompts, by name; a single one is called `prompt`.
        prompt_privacy: What was to be kept of them.
        conditioning: What was around the tensors of nested conditionings, by name; `{"$tensor": name}` stands where a
            tensor was.
        metadata: The caller's own values.
        header: The texts of the header that are not a dump's.
    """

    tensors: Mapping[str, SavedTensor] = field(default_factory=dict)
    run_id: str | None = None
    encoder: str | None = None
    prompts: Mapping[str, StoredPrompt] = field(default_factory=dict)
    prompt_privacy: PromptPrivacy | None = None
    conditioning: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    header: Mapping[str, str] = field(default_factory=dict)


def saved_tensor(tensor: Tensor) -> SavedTensor:
    """Shape, dtype and device of a tensor."""
    return SavedTensor(
        tuple(int(size) for size in tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        str(tensor.device),
    )


def to_header(metadata: DumpMetadata) -> dict[str, str]:
    """The header's texts.

    Raises:
        TypeError: A value is no JSON value.
    """
    texts = {"format": "pt", SCHEMA_KEY: SCHEMA, **metadata.header}
    if metadata.run_id is not None:
        texts["run_id"] = metadata.run_id
    if metadata.encoder is not None:
        texts["encoder"] = metadata.encoder
    if metadata.prompt_privacy is not None:
        texts["prompt"] = plain_json.dumps(
            {
                "privacy": metadata.prompt_privacy,
                "prompts": {name: _plain_prompt(prompt) for name, prompt in metadata.prompts.items()},
            }
        )
    texts["tensors"] = plain_json.dumps(
        {
            name: {"shape": list(saved.shape), "dtype": saved.dtype, "device": saved.device}
            for name, saved in metadata.tensors.items()
        }
    )
    for name, value in (("conditioning", metadata.conditioning), ("metadata", metadata.metadata)):
        if value:
            texts[name] = plain_json.dumps(value)
    return texts


def from_header(path: Path, texts: Mapping[str, str]) -> DumpMetadata:
    """What the header of a file says; a file without our mark keeps its own texts in `header`.

    Raises:
        CheckpointError: A dump's header is damaged, or of a later version.
    """
    schema = texts.get(SCHEMA_KEY)
    if schema is None:
        return DumpMetadata(header=dict(texts))
    if schema != SCHEMA:
        raise CheckpointError(
            path,
            f"is a dump of version {schema[:20]!r}; this version knows {SCHEMA}.",
            hint="Update Sigmascope.",
        )
    try:
        fields = {name: plain_json.loads(texts.get(name, "{}")) for name in _JSON_FIELDS}
        return _parsed(texts, fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            path, f"the dump's header is damaged ({type(error).__name__}: {error}).", hint="Save it anew."
        ) from error


def _parsed(texts: Mapping[str, str], fields: Mapping[str, Any]) -> DumpMetadata:
    privacy = fields["prompt"].get("privacy")
    if privacy is not None:
        check_privacy(privacy)
    known = {"format", SCHEMA_KEY, "run_id", "encoder", *_JSON_FIELDS}
    return DumpMetadata(
        tensors={
            name: SavedTensor(tuple(map(int, saved["shape"])), str(saved["dtype"]), saved.get("device"))
            for name, saved in fields["tensors"].items()
        },
        run_id=texts.get("run_id"),
        encoder=texts.get("encoder"),
        prompts={
            name: StoredPrompt(str(prompt["sha256"]), prompt.get("text"))
            for name, prompt in fields["prompt"].get("prompts", {}).items()
        },
        prompt_privacy=privacy,
        conditioning=dict(fields["conditioning"].items()),
        metadata=dict(fields["metadata"].items()),
        header={name: text for name, text in texts.items() if name not in known},
    )


def _plain_prompt(prompt: StoredPrompt) -> dict[str, str]:
    plain = {"sha256": prompt.sha256}
    return plain if prompt.text is None else plain | {"text": prompt.text}
