"""The base that a training makes for itself, where its YAML names none: as LBM's trainings do.

It is made once, as `sigmascope lbm create-base` makes it, and lies in the run's folder with its YAML. Later sessions and
`lora extract` find it there.
"""

import torch

from sigmascope.checkpoints import atomic_path
from sigmascope.checkpoints.checkpoint import is_existing
from sigmascope.errors import ConfigError
from sigmascope.lbm.base import check_backbone, create_base
from sigmascope.lbm.config import load_config
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.progress import Progress, no_progress


def make_own_base(settings: TrainSettings, progress: Progress = no_progress) -> None:
    """Make the base from `backbone_signature`, unless it is there or the YAML names another.

    Args:
        settings: Of the run.
        progress: Told after each tensor.

    Raises:
        SigmascopeError: As of `create_base`; or the base that is there came from another backbone.
    """
    if not settings.makes_base or _is_there(settings):
        return
    path = settings.base_model_path
    with atomic_path(path.with_suffix(".yaml")) as described:
        described.write_text(settings.lbm.to_yaml(), encoding="utf-8")
    create_base(settings.lbm, path, dtype=torch.bfloat16, both=False, progress=progress)


def check_own_base(settings: TrainSettings) -> bool:
    """Whether the base is still to be made; then its backbone is here, and fits.

    Raises:
        SigmascopeError: As of `make_own_base`, where making it is not needed to see it.
    """
    if not settings.makes_base or _is_there(settings):
        return False
    check_backbone(settings.lbm)
    return True


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
                hint="Choose another save_ckpt_path, or remove that base.",
            )
    return True
