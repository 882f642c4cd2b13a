"""The strength of a LoRA that users set."""

from math import isfinite

from sigmascope.errors import ConfigError


def finite_scale(scale: float) -> float:
    """Give the scale back.

    Raises:
        ConfigError: It is NaN or infinite.
    """
    if not isfinite(scale):
        raise ConfigError(f"a LoRA scale of {scale} is no number.", hint="Give a scale such as 1.0.")
    return scale
