"""What is read and how it is batched, as the caller says it."""

from dataclasses import dataclass

from sigmascope.errors import ConfigError
from sigmascope.lbm.buckets import Size, scaled_buckets
from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.shards.pictures import Crop

FEWEST = {"batch_size": 1, "seed": 0, "shuffle_buffer": 0, "workers": 0, "process": 0, "processes": 1}
"""Smallest value of each number among the options."""


@dataclass(frozen=True)
class DataOptions:
    """What is read and how it is batched.

    Attributes:
        shards: Paths with braces, globs or `~`, folders, or `pipe:` commands when `allow_pipe`.
        batch_size: Samples in a batch of this process.
        seed: Of the order and of random crops.
        shuffle: False gives the shards' own order, for validation.
        shuffle_buffer: Samples that are mixed with each other.
        allow_pipe: Whether `pipe:` commands may be run.
        crop: The part of a picture whose shape is not the batch's.
        size: (width, height) of all samples; None is each one's nearest aspect bucket.
        process: This process's number. Sample i of the stream belongs to process i modulo `processes`.
        processes: How many processes share the stream.
        workers: Threads that decode ahead; 0 decodes when a batch is asked for.
    """

    shards: tuple[str, ...]
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    shuffle_buffer: int = 256
    allow_pipe: bool = False
    crop: Crop = "center"
    size: Size | None = None
    process: int = 0
    processes: int = 1
    workers: int = 2


def check_options(options: DataOptions, config: LbmConfig) -> None:
    """Refuse options that make no sense.

    Raises:
        ConfigError: Names the option.
    """
    for name, fewest in FEWEST.items():
        value = getattr(options, name)
        if value < fewest:
            raise ConfigError(f"{name}: expected {fewest} or more, got {value}.", hint="Correct it.")
    if options.process >= options.processes:
        raise ConfigError(
            f"process: expected 0 to {options.processes - 1}, got {options.process}.", hint="Count from 0."
        )
    if options.crop not in ("center", "random"):
        raise ConfigError(f"crop: expected center or random, got {options.crop!r}.", hint="Use center.")
    _check_size(options.size, config)


def _check_size(size: Size | None, config: LbmConfig) -> None:
    if size is None:
        scaled_buckets(config.resolution, config.factor)  # refuses a resolution that is too small
    elif min(size) < 1 or any(side % config.factor for side in size):
        raise ConfigError(
            f"image_size: expected multiples of {config.factor}, got {size[0]}x{size[1]}.",
            hint="Leave it out for the nearest aspect bucket.",
        )
