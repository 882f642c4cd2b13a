"""The base model of an extraction, made where it is missing and `--create_base_model` asks for it."""

from pathlib import Path

from sigmascope.cli.extras import needs_extra
from sigmascope.cli.progress import progress_bar
from sigmascope.errors import CheckpointError, ConfigError


def require_base(base: Path, *, create: bool, backbone: str | None, config: Path | None) -> None:
    """Make the base model when it is missing and that was asked for; otherwise refuse to start without one.

    Raises:
        ConfigError: An option of base creation that has no effect, or a backbone that cannot be had.
        CheckpointError: The base does not exist.
    """
    for flag, value in (("--backbone_signature", backbone), ("--config_path", config)):
        if value is not None and not create:
            raise ConfigError(
                f"{flag} {value} is for --create_base_model only.", hint="Add it, or leave both out."
            )
    from sigmascope.lora.paths import exists

    if exists(base):
        return
    if not create:
        raise CheckpointError(
            base,
            "there is no base model.",
            hint="Give the checkpoint that the fine-tuning started from, or add --create_base_model.",
        )
    with needs_extra("lbm"):
        from sigmascope.lbm.base import create_base
        from sigmascope.lbm.config import LbmConfig, load_config

    with progress_bar("Creating base") as progress:
        create_base(
            load_config(config) if config else LbmConfig(),
            base,
            backbone=backbone,
            both=False,
            progress=progress,
        )
