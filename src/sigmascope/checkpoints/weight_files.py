"""Which file of a folder holds its weights: plain, sharded, or one of several variants.

The names are diffusers' and transformers': `model.safetensors`, `diffusion_pytorch_model.safetensors`, their
indexes (`….safetensors.index.json`), and with a variant in the name, `….fp16.safetensors` and
`….safetensors.index.fp16.json`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sigmascope.checkpoints.paths import is_folder, names_in
from sigmascope.errors import CheckpointError

INDEX_SUFFIX: Final = ".safetensors.index.json"
PICKLE_SUFFIXES: Final = (".ckpt", ".pt", ".pth", ".bin")
_USUAL: Final = ("model", "diffusion_pytorch_model")
_OF_A_SHARD: Final = re.compile(r"-\d{5}-of-\d{5}$")
_PREFERRED_VARIANTS: Final = ("fp32", "bf16", "fp16")
"""Of several variants without a plain file: the one that has lost least."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The usual files of weights of one folder, by variant; of the plain ones the variant is empty."""

    folder: Path
    by_variant: dict[str, str]

    @property
    def variants(self) -> list[str]:
        """The variants beside the plain files."""
        return sorted(filter(None, self.by_variant))

    def choose(self, variant: str | None) -> Path | None:
        """The file or index for a variant; without one the plain file, else the variant that lost least.

        Raises:
            CheckpointError: There are several variants, none plain, and none of a known precision.
        """
        if variant is not None:
            return self._path(variant)
        for wanted in ("", *_PREFERRED_VARIANTS):
            if wanted in self.by_variant:
                return self._path(wanted)
        if len(self.by_variant) > 1:
            raise CheckpointError(
                self.folder,
                f"has its weights in the variants {', '.join(self.variants)}.",
                hint="Choose one with variant=.",
            )
        return self._path(next(iter(self.by_variant), ""))

    def _path(self, variant: str) -> Path | None:
        name = self.by_variant.get(variant)
        return None if name is None else self.folder / name


def weight_files(folder: Path) -> WeightFiles:
    """List the usual files of weights of a folder.

    Raises:
        CheckpointError: The folder cannot be listed.
    """
    names = names_in(folder)
    found: dict[str, str] = {}
    for stem in _USUAL:
        for name in names:
            variant = _variant_of(name, stem)
            if variant is None:
                continue
            # A whole file before an index of shards, `model` before `diffusion_pytorch_model`.
            of_this_stem = variant in found and found[variant].startswith(stem)
            if variant not in found or (of_this_stem and name.endswith(".safetensors")):
                found[variant] = name
    return WeightFiles(folder, found)


def _variant_of(name: str, stem: str) -> str | None:
    """The variant in a file's name, empty for a plain one; None for a shard and for any other file."""
    index = re.fullmatch(rf"{stem}\.safetensors\.index(?:\.([\w-]+))?\.json", name)
    if index is not None:
        return index[1] or ""
    whole = re.fullmatch(rf"{stem}(?:\.([\w-]+))?\.safetensors", name)
    if whole is None or _OF_A_SHARD.search(name.removesuffix(".safetensors")):
        return None
    return whole[1] or ""


def only_file(folder: Path) -> Path:
    """The one file of weights of a folder that has none of the usual names.

    Raises:
        CheckpointError: There are several, or none.
    """
    names = [name for name in names_in(folder) if not name.startswith(".")]
    for suffixes in ((INDEX_SUFFIX,), (".safetensors",), (".gguf",), PICKLE_SUFFIXES):
        candidates = [name for name in names if name.endswith(suffixes)]
        if len(candidates) == 1:
            return folder / candidates[0]
        if candidates:
            raise _several(folder, candidates)
    raise CheckpointError(folder, "is a folder without weights.", hint=_subfolder_hint(folder))


def _several(folder: Path, candidates: Sequence[str]) -> CheckpointError:
    message = f"has {len(candidates)} files of weights."
    return CheckpointError(folder, message, hint=f"Name one of them: {', '.join(candidates[:8])}.")


def _subfolder_hint(folder: Path) -> str:
    inside = [name for name in names_in(folder) if _has_safetensors(folder / name)]
    if inside:
        return f"Its folders {', '.join(inside[:8])} have some: name one of them."
    return "Name a .safetensors file, an index, or a .ckpt."


def _has_safetensors(child: Path) -> bool:
    try:
        return is_folder(child) and any(name.endswith(".safetensors") for name in names_in(child))
    except CheckpointError:
        return False  # one that may not be entered is no help as a hint
