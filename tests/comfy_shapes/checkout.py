"""A real ComfyUI checkout, imported without what it needs for images, sound and a server."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

VARIABLE = "SIGMASCOPE_COMFYUI"
_NOT_NEEDED = ("comfy_aimdo", "einops", "torchvision", "torchsde", "torchaudio", "kornia", "av", "aiohttp")
_ALSO_NOT_NEEDED = (
    "spandrel",
    "sentencepiece",
    "alembic",
    "comfyui_frontend_package",
    "simpleeval",
    "blake3",
)
_KERNELS = "comfy_kitchen"
"""ComfyUI 0.33 does without its types and its fp8 rounding where it is not installed, but asks it for attention."""


class _Kind(type):
    """The type of a class that has whatever constant is asked of it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class Anything(ModuleType):
    """A module that has whatever class is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Kind(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last: gives an empty module for a package that is not installed here."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == _KERNELS or name.partition(".")[0] in _NOT_NEEDED + _ALSO_NOT_NEEDED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name != _KERNELS:
            return Anything(spec.name)
        kernels = ModuleType(_KERNELS)
        vars(kernels)["int8_attention_is_available"] = lambda: False
        return kernels

    def exec_module(self, module: ModuleType) -> None:
        pass


class Checkout:
    """The modules of one checkout. They stay imported for the rest of the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sys.meta_path.append(_Finder())
        sys.path.insert(0, str(folder))
        arguments, sys.argv = sys.argv, ["comfyui", "--cpu"]
        try:
            self._import()
        finally:
            sys.argv = arguments

    def _import(self) -> None:
        level = logging.getLogger().level
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("comfy.options").enable_args_parsing()
            for name in ("model_patcher", "lora", "ops", "utils"):
                setattr(self, name, importlib.import_module(f"comfy.{name}"))
        logging.getLogger().setLevel(level)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"comfy.{name} was not imported")

    def module(self, name: str) -> Any:
        """Another module of it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)

    def knows(self, kind: str) -> bool:
        """Whether this version knows a kind of change; the first versions know LoRA, LoHa and LoKr."""
        names = ("model_patcher.py", "lora.py", "weight_adapter")
        files = [self.folder / "comfy" / name for name in names]
        sources = [file for path in files for file in (path.rglob("*.py") if path.is_dir() else [path])]
        word = {
            "dora": "dora_scale",
            "newer glora": "old_glora",
            "oft": "oft_blocks",
            "boft": "BOFT",
            "set": '"set"',
        }.get(kind, kind)
        return any(word in source.read_text() for source in sources if source.is_file())

    @property
    def has_kernels(self) -> bool:
        """Whether comfy_kitchen is installed itself, without which there are no quantised weights since 0.33."""
        found = importlib.util.find_spec(_KERNELS)
        return found is not None and not isinstance(found.loader, _Finder)

    @property
    def version(self) -> str:
        file = self.folder / "comfyui_version.py"
        return file.read_text().rpartition("=")[2].strip().strip('"') if file.is_file() else "before 0.3"


def load_in_part(patcher: Any, memory: int, **options: bool) -> None:
    """Load with that many bytes for weights, by the version's way."""
    older = getattr(patcher, "patch_model_lowvram", None)
    load = patcher.patch_model if older is None else older
    if "lowvram_model_memory" not in inspect.signature(load).parameters:
        pytest.skip("this version does not load in part")
    load(device_to=torch.device("cpu"), lowvram_model_memory=memory, **options)


def why_not() -> str | None:
    """Why there is no checkout to test against; None if there is one."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return f"{VARIABLE} names no ComfyUI checkout"
    if not (Path(folder) / "comfy" / "model_patcher.py").is_file():
        return f"{VARIABLE}={folder} has no comfy/model_patcher.py"
    return None
