"""The folder in ComfyUI's `custom_nodes` that begins the watch with each start: put there, taken away, looked at.

It holds a loader of a few lines and the description that ComfyUI-Manager reads. Nodes and scripts are in the package.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Final, TypedDict

from sigmascope.__about__ import __version__
from sigmascope.errors import ConfigError, WriteError
from sigmascope.files import atomic_path, reason_of, writing_hint
from sigmascope.integrations.comfyui.instruments import kinds
from sigmascope.integrations.comfyui.session import FOLDER, PATTERN, STATUS_FILE

_NAME: Final = "sigmascope"
_SWITCHED_OFF: Final = ".disabled"
_MARK: Final = "# Written by sigmascope comfyui install."
_LOADER: Final = f'''{_MARK}
"""Every prompt becomes a record of Sigmascope. `sigmascope comfyui uninstall` takes this folder away."""

import logging

NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, WEB_DIRECTORY = {{}}, {{}}, None

try:
    from sigmascope.integrations.comfyui.loader import load

    NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, WEB_DIRECTORY = load()
except Exception as failure:
    logging.warning("sigmascope: prompts are not watched (%s: %s)", type(failure).__name__, failure)
'''
_DESCRIPTION: Final = f"""{_MARK}
[project]
name = "sigmascope"
description = "Every prompt becomes a record: time, memory and peak of each node, steps, model files, LoRA verdicts."
version = "{__version__}"
dependencies = ["sigmascope"]

[tool.comfy]
PublisherId = "sigmascope"
DisplayName = "Sigmascope"
"""
_NO_SOURCE: Final = "ComfyUI's source is not in this folder"
_FILES: Final = {
    "__init__.py": _LOADER,
    "pyproject.toml": _DESCRIPTION,
    "requirements.txt": f"{_MARK}\nsigmascope\n",  # ComfyUI-Manager installs what is here, not what the description says
}


class PartStatus(TypedDict):
    """Whether an instrument fits a ComfyUI, by its source if that is there, and how it was at the last start."""

    name: str
    gives: str
    fits: bool | None
    why_not: str | None
    last_start: str | None


class PackStatus(TypedDict):
    """What `sigmascope comfyui status` says."""

    path: str
    comfyui: str | None
    installed: bool
    pack: str
    instruments: list[PartStatus]
    last_start: dict[str, Any] | None
    records: list[str]


def install(path: Path) -> Path:
    """Put the folder there; one of ours that is there is renewed, whatever it is called.

    Args:
        path: ComfyUI's folder, with `main.py`, or the one that it is started on with `--base-directory`.

    Returns:
        The pack's folder.

    Raises:
        ConfigError: That is no ComfyUI, or the pack's name is taken by something else.
        WriteError: It cannot be written.
    """
    pack = _pack_of(path)
    if pack.is_symlink() and not pack.exists():
        raise ConfigError(f"{pack} is a link that leads nowhere.", hint="Remove it, and install again.")
    if pack.exists() and not _is_ours(pack):
        raise ConfigError(f"{pack} is there, and is not ours.", hint="Move it away, and install again.")
    try:
        pack.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(pack, f"cannot be made ({reason_of(error)}).", hint=writing_hint(error)) from error
    for name, text in _FILES.items():
        with atomic_path(pack / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return pack


def uninstall(path: Path) -> bool:
    """Take the folder away, and copies of it under other names; False if there was none. Records stay.

    Of a folder that is a link, the link alone is taken away.

    Raises:
        ConfigError: That is no ComfyUI, or the folder is not ours or holds what we did not put there.
        WriteError: It cannot be removed.
    """
    was_there = False
    while (pack := _pack_of(path)).exists():
        _remove(pack)
        was_there = True
    return was_there


def _remove(pack: Path) -> None:
    """Take a folder away that is ours.

    Raises:
        ConfigError, WriteError: As of `uninstall`.
    """
    known = {*_FILES, "__pycache__"}
    others = (
        sorted(entry.name for entry in pack.iterdir() if entry.name not in known) if pack.is_dir() else []
    )
    if not _is_ours(pack) or others:
        what = f"holds {', '.join(others)}" if others else "is not ours"
        raise ConfigError(f"{pack} {what}.", hint="Look into it, and remove it by hand.")
    try:
        if pack.is_symlink():
            pack.unlink()
        else:
            shutil.rmtree(pack)
    except OSError as error:
        raise WriteError(
            pack, f"cannot be removed ({reason_of(error)}).", hint=writing_hint(error)
        ) from error


def status(path: Path) -> PackStatus:
    """What is installed, which instruments fit this version, and what the last start found. Changes nothing.

    Raises:
        ConfigError: That is no ComfyUI.
    """
    pack = _pack_of(path)
    records = Path(os.environ.get(FOLDER) or path / "user" / "sigmascope")
    last, has_source = _last_start(records), _has_source(path)
    by_name = {part.get("name"): part for part in (last or {}).get("instruments", ())}
    parts: list[PartStatus] = []
    for kind in kinds():
        why_not: str | None = _NO_SOURCE
        if has_source:
            why_not = next((fault for need in kind.needs if (fault := need.fault_in(path)) is not None), None)
        known = by_name.get(kind.name, {})
        state, reason = known.get("state"), known.get("reason")
        parts.append(
            {
                "name": kind.name,
                "gives": kind.gives,
                "fits": why_not is None if has_source else None,
                "why_not": why_not,
                "last_start": f"{state}: {reason}" if state and reason else state,
            }
        )
    return {
        "path": str(path),
        "comfyui": _version_in(path),
        "installed": _is_ours(pack),
        "pack": str(pack),
        "instruments": parts,
        "last_start": last,
        "records": sorted(str(file) for file in records.glob(PATTERN)),
    }


def _pack_of(path: Path) -> Path:
    is_base = (path / "custom_nodes").is_dir() and (path / "models").is_dir()
    if not _has_source(path) and not is_base:
        raise ConfigError(
            f"{path} is no ComfyUI: it has no main.py or no folder comfy.",
            hint="Name the folder that main.py lies in, or the one that ComfyUI is started on with --base-directory.",
        )
    packs = path / "custom_nodes"
    own_name = packs / _NAME
    if own_name.exists() or own_name.is_symlink() or not packs.is_dir():
        return own_name
    # One that was copied or cloned there may be called otherwise. ComfyUI loads none whose name ends so.
    others = (pack for pack in sorted(packs.iterdir()) if pack.suffix != _SWITCHED_OFF and _is_ours(pack))
    return next(others, own_name)


def _has_source(path: Path) -> bool:
    return (path / "main.py").is_file() and (path / "comfy").is_dir()


def _is_ours(pack: Path) -> bool:
    try:
        return (pack / "__init__.py").read_text(encoding="utf-8").startswith(_MARK)
    except (OSError, UnicodeDecodeError):
        return False


def _version_in(path: Path) -> str | None:
    try:
        text = (path / "comfyui_version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    found = re.search(r'__version__ = "([^"]{1,40})"', text)
    return found[1] if found else None


def _last_start(records: Path) -> dict[str, Any] | None:
    try:
        known = json.loads((records / STATUS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    parts = known.get("instruments") if isinstance(known, dict) else None
    is_ours = isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
    return known if is_ours else None
