"""The base that a training makes for itself, where its YAML names none: as LBM's trainings do.

It is made once, as `sigmascope lbm create-base` makes it, and lies in the run's folder with its YAML and the checksums of
the backbone's files. Later sessions and `lora extract` find it there. A backbone whose files have changed is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sigmascope.checkpoints import atomic_path
from sigmascope.checkpoints.checkpoint import is_existing
from sigmascope.checkpoints.reader import no_such_file
from sigmascope.errors import CheckpointError, ConfigError, SigmascopeError
from sigmascope.lbm.base import check_backbone, create_base, open_backbone
from sigmascope.lbm.config import load_config
from sigmascope.lbm.training.checkpoints import file_facts
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.progress import Progress, no_progress

_ANOTHER = "Choose another save_ckpt_path, or remove that base."


def make_own_base(settings: TrainSettings, progress: Progress = no_progress) -> None:
    """Make the base from `backbone_signature`, unless it is there or the YAML names another.

    Args:
        settings: Of the run.
        progress: Told after each tensor.

    Raises:
        SigmascopeError: As of `create_base`; or the base that is there came from another backbone, or from other
            content of its files; or the one that the YAML names does not exist.
    """
    if not settings.makes_base:
        _require_named(settings)
    if not settings.makes_base or _is_there(settings):
        return
    path = settings.base_model_path
    with atomic_path(path.with_suffix(".yaml")) as described:
        described.write_text(settings.lbm.to_yaml(), encoding="utf-8")
    # Before the base is made: files that change meanwhile are then noticed, not missed.
    with atomic_path(_facts_path(path)) as facts:
        facts.write_text(json.dumps(_backbone_facts(settings), indent=1), encoding="utf-8")
    create_base(settings.lbm, path, dtype=torch.bfloat16, both=False, progress=progress)


def check_own_base(settings: TrainSettings) -> bool:
    """Whether the base is still to be made; then its backbone is here, and fits.

    Raises:
        SigmascopeError: As of `make_own_base`, where making it is not needed to see it.
    """
    if not settings.makes_base:
        _require_named(settings)
    if not settings.makes_base or _is_there(settings):
        return False
    check_backbone(settings.lbm)
    return True


def _require_named(settings: TrainSettings) -> None:
    path = settings.base_model_path
    if not is_existing(path):
        missing = no_such_file(path)
        raise CheckpointError(
            path, f"base_model_path names it, but it {missing.message.partition(': ')[2]}", hint=missing.hint
        )


def _is_there(settings: TrainSettings) -> bool:
    path = settings.base_model_path
    described = path.with_suffix(".yaml")
    if not is_existing(path):
        return False
    if is_existing(described):
        made_from = load_config(described).backbone_signature
        if made_from != settings.backbone_signature:
            raise ConfigError(
                f"{path} was made from {made_from}, and backbone_signature is {settings.backbone_signature}.",
                hint=_ANOTHER,
            )
    if changed := _changed_file(settings):
        raise ConfigError(
            f"{path} was made from {settings.backbone_signature}, and {changed} has changed since.",
            hint=_ANOTHER,
        )
    return True


def _facts_path(base: Path) -> Path:
    return base.with_name(f"{base.stem}_backbone.json")


def _backbone_files(settings: TrainSettings) -> tuple[Path, ...]:
    with open_backbone(settings.backbone_signature, settings.lbm) as source:
        return tuple(source.files)


def _stamp(file: Path) -> dict[str, int]:
    return {"bytes": file.stat().st_size, "mtime_ns": file.stat().st_mtime_ns}


def _backbone_facts(settings: TrainSettings) -> list[dict[str, Any]]:
    return [{**_stamp(file), **file_facts(file)} for file in _backbone_files(settings)]


def _changed_file(settings: TrainSettings) -> Path | None:
    """The first of the backbone's files whose content is another than when the base was made.

    None where it is the same, or where that is unknown: the backbone is no longer here, or nobody kept its checksums.
    """
    try:
        kept: list[Mapping[str, Any]] = json.loads(_facts_path(settings.base_model_path).read_text("utf-8"))
        files = _backbone_files(settings)
        if len(files) != len(kept):
            return files[0].parent
        for file, facts in zip(files, kept, strict=True):
            if any(facts[key] != value for key, value in _stamp(file).items()) and any(
                facts[key] != value for key, value in file_facts(file).items()
            ):
                return file
    except (OSError, ValueError, LookupError, TypeError, SigmascopeError):
        return None
    return None
