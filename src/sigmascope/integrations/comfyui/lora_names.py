"""Which LoRA files a node of ComfyUI is given, reads, or is told of in words that nothing reads.

Loaders take names as `lora_name`, in lists and dicts of any kind, or out of the prompt. One of the file's first numbers tells
which of several files some patches were made of.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from sigmascope.integrations.comfyui.files import FILES
from sigmascope.integrations.comfyui.recording import NodeWatch
from sigmascope.probes.reading import attempt

_NONE: Final = "None"
"""What loaders of other packs offer beside the files' names."""
_OTHER_FILES: Final = ("ckpt_name", "clip_name", "control_net_name", "unet_name", "vae_name")
"""Ends of inputs that name files of other kinds, of which one may be called as a LoRA is."""
_DEEPEST: Final = 8
"""Levels of lists and dicts in which a node is given the names of LoRAs."""
_TYPES: Final = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin")
_TAG: Final = re.compile(r"<lora:([^:<>]+)[:>]")
UNNAMED: Final = "(unnamed)"
Sample = tuple[str, list[float]]
"""The name of a matrix in a file, and the first numbers of it."""


def path_of(name: Any) -> str | None:
    """Where a LoRA file lies that a node names; None: ComfyUI does not find it."""
    folders = sys.modules.get("folder_paths")
    if folders is None or not isinstance(name, str):
        return None
    found = folders.get_full_path("loras", name)
    return found if isinstance(found, str) else None


def names_in(inputs: Mapping[str, Any]) -> Iterator[str]:
    """The LoRA files that a node is given: as `lora_name`, or where one of its values, or what lies in one, names a file."""
    name = inputs.get("lora_name")
    others = [value for key, value in inputs.items() if not key.endswith(("lora_name", *_OTHER_FILES))]
    if isinstance(name, str) and name != _NONE:
        yield name
    yield from (text for text in _texts_in(others, _DEEPEST) if path_of(text) is not None)


def names_read(node: NodeWatch) -> list[str]:
    """The LoRA files that a node read, such as one that takes their names out of a prompt; none where a name is that of two."""
    known = _files()
    read = [file["file"] for file in node.facts.get(FILES, ())]
    found = [[name for name in known if Path(name).name == file] for file in read]
    return [] if any(len(names) > 1 for names in found) else [name for names in found for name in names]


def missing_in(inputs: Mapping[str, Any]) -> list[str]:
    """The files that a node is given as LoRAs, and that ComfyUI does not find."""
    given = [value for key, value in inputs.items() if "lora" in key.lower() and key != "lora_name"]
    texts = (text for text in _texts_in(given, _DEEPEST) if text.lower().endswith(_TYPES))
    return list(dict.fromkeys(text for text in texts if path_of(text) is None))


def tags_in(texts: Sequence[Any]) -> list[str]:
    """The LoRA files that texts name as `<lora:style:0.8>`, which other programs read; without the name where there is none."""
    tags = [tag.strip() for text in texts if isinstance(text, str) for tag in _TAG.findall(text)]
    known = {Path(name).with_suffix("").name: name for name in _files() if tags}
    return list(
        dict.fromkeys(known.get(Path(tag).name.removesuffix(".safetensors"), UNNAMED) for tag in tags)
    )


def _files() -> Sequence[str]:
    folders: Any = sys.modules.get("folder_paths")
    return attempt(lambda: folders.get_filename_list("loras")).value or ()


def _texts_in(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif depth and isinstance(value, Mapping):
        if value.get("on") is not False:
            yield from _texts_in(list(value.values()), depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _texts_in(item, depth - 1)


def sample_of(tensors: Mapping[str, torch.Tensor]) -> Sample | None:
    """What tells a LoRA from others of the same names, read on the processor."""
    name = min(name for name, tensor in tensors.items() if tensor.ndim > 1)
    return (name, tensors[name][0].flatten()[:8].tolist()) if tensors[name].device.type == "cpu" else None


def in_order(
    names: Sequence[str], patches: Sequence[tuple[Sample | None, frozenset[int]]]
) -> list[frozenset[int]]:
    """The patches of each file: nodes may put LoRAs on in another order than they are named in.

    In the order of the names, where the files do not tell.
    """
    made = [own for _, own in patches]
    samples = [sample for sample, _ in patches]
    found = [attempt(partial(_place_of, path_of(name), samples)).value for name in names]
    return (
        made if None in found or len({*found}) < len(found) else [made[at] for at in found if at is not None]
    )


def _place_of(path: Any, samples: Sequence[Sample | None]) -> int | None:
    with safe_open(path, "pt") as file:
        held = {*file.keys()}
        return next(
            (
                at
                for at, sample in enumerate(samples)
                if sample is not None
                and sample[0] in held
                and file.get_slice(sample[0])[:1].flatten()[:8].tolist() == sample[1]
            ),
            None,
        )
