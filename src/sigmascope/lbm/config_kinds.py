"""Which YAML one is: that of a model, or that of a training, which users take for each other."""

from collections.abc import Collection, Mapping
from typing import Any, Final

from sigmascope.errors import ConfigError

TRAINING_NEEDS: Final = ("train_shards", "base_model_path", "save_ckpt_path")
"""Keys that every training's YAML has; no model's has one of them."""


def refuse_training(data: Mapping[str, Any], where: str) -> None:
    """Refuse the YAML of a training where a model's is wanted.

    Args:
        data: What was given; two of the keys that every training needs tell it apart from a slip.
        where: The file, or what the mapping is.

    Raises:
        ConfigError: It is one; names the command that it is for.
    """
    found = [key for key in TRAINING_NEEDS if key in data]
    if len(found) > 1:
        raise ConfigError(
            f"{where}: is a configuration for training ({', '.join(found)}), and a model's is wanted here.",
            hint="Train with it: sigmascope lbm train --path_config FILE. For a model, give a file with the model's "
            "own keys alone, or leave it out where one lies beside the model.",
        )


def refuse_model(data: Mapping[str, Any], model_keys: Collection[str], where: str) -> None:
    """Refuse the YAML of a model where a training's is wanted.

    Args:
        data: What was given.
        model_keys: Keys that a model's YAML may have.
        where: The file, or what the mapping is.

    Raises:
        ConfigError: It holds keys of a model and nothing else.
    """
    if data and all(key in model_keys for key in data):
        raise ConfigError(
            f"{where}: describes a model alone, and a training is wanted here: "
            f"{', '.join(TRAINING_NEEDS)} are required.",
            hint="Add these keys (docs/lbm-train-config.md), or give the file to sigmascope lbm infer --config_path.",
        )
