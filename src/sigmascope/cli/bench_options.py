"""What a user typed for `sigmascope bench`, as cases and arguments."""

import json
import re
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from sigmascope.errors import ConfigError
from sigmascope.records.benchmark import BenchCase

if TYPE_CHECKING:
    import torch

    from sigmascope.pipeline.benching.loading import Offload

_SIZE = re.compile(r"(\d+)(?:[x×](\d+))?")


def cases_of(
    steps: str | None, resolution: str | None, batch: str, frames: int | None
) -> tuple[BenchCase, ...]:
    """Every combination of what the options list.

    Args:
        steps: Numbers by comma; None: the pipeline's own.
        resolution: Sizes by comma, each WIDTHxHEIGHT or the side of a square; None: the pipeline's own.
        batch: Numbers by comma.
        frames: Of a video.

    Raises:
        ConfigError: Something is no number above 0, or no size.
    """
    if frames is not None and frames < 1:
        raise ConfigError(f"--frames is {frames}.", hint="Give 1 or more.")
    sizes = [None] if resolution is None else [_size(one) for one in _listed(resolution)]
    counts = [None] if steps is None else [_number(one, "--steps") for one in _listed(steps)]
    batches = [_number(one, "--batch") for one in _listed(batch)]
    return tuple(
        BenchCase(None if size is None else size[0], None if size is None else size[1], many, count, frames)
        for size, many, count in product(sizes, batches, counts)
    )


def call_values(entries: Sequence[str]) -> dict[str, Any]:
    """`guidance_scale=1.0` as a name and a value: of JSON, or the text itself.

    Raises:
        ConfigError: An entry is not NAME=VALUE.
    """
    values: dict[str, Any] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not name.isidentifier() or not equals:
            raise ConfigError(
                f"--call: expected NAME=VALUE, got {entry!r}.", hint="For example guidance_scale=1.0."
            )
        values[name] = _value(text)
    return values


def checked_offload(text: str, device: "torch.device") -> "Offload":
    """The offloading of that name.

    Raises:
        ConfigError: There is none, or nothing to offload from.
    """
    if text not in ("none", "model", "sequential"):
        raise ConfigError(f"--offload is {text!r}.", hint="Use none, model or sequential.")
    if text != "none" and device.type == "cpu":
        raise ConfigError(f"--offload {text}: the pipeline runs in RAM as it is.", hint="Leave it out.")
    return text  # type: ignore[return-value]  # one of the three


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _number(text: str, flag: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{flag}: expected numbers from 1 on, got {text!r}.", hint="Write several as 1,4,8."
        )
    return int(text)


def _size(text: str) -> tuple[int, int]:
    found = _SIZE.fullmatch(text.lower())
    if found is None or int(found[1]) * int(found[2] or 1) == 0:
        raise ConfigError(
            f"--resolution: expected WIDTHxHEIGHT or one side, got {text!r}.",
            hint="Write several as 512,1024x768.",
        )
    return int(found[1]), int(found[2] or found[1])
