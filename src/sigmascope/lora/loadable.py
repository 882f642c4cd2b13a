"""Whether a written LoRA file is taken by the hosts that its format is for: "written" means "loads".

The answer is that of `hosts.host_readings`, whose rules are measured on the hosts' own loaders.
"""

from pathlib import Path
from typing import Final

from sigmascope.errors import LoraFormatError
from sigmascope.lora.hosts import HOSTS, HostReading, host_readings, strengths_in_words
from sigmascope.lora.module_names import file_family
from sigmascope.lora.reader import open_any_kind
from sigmascope.units import counted

_HOST_OF_FORMAT: Final = {"peft": "diffusers", "comfyui": "comfyui", "kohya": "comfyui"}
"""What a format is written for; native files are for what reads the model's own names."""
_NAMES: Final = {"diffusers": "diffusers", "comfyui": "ComfyUI"}


def loads_of(path: Path) -> dict[str, HostReading]:
    """What the newest version of each host makes of a file, by the host's name.

    Raises:
        CheckpointError: The file is damaged.
        LoraFormatError: Its keys follow no known format.
    """
    newest: dict[str, HostReading] = {}
    for host, reading in zip(HOSTS, host_readings(path), strict=True):
        newest.setdefault(host.name, reading)
    return newest


def require_loadable(written: Path, *, target: Path, format: str) -> None:
    """Refuse a file of which the host that its format is for would take nothing.

    Args:
        written: The file, before it takes the target's place.
        target: That place, for the error.
        format: The format that it was written in.

    Raises:
        LoraFormatError: The host takes none of its modules.
    """
    host = _HOST_OF_FORMAT.get(format)
    if host is None:
        return
    try:
        reading = loads_of(written)[host]
    except LoraFormatError:  # kinds of changes that the readings leave out
        return
    if reading.modules and reading.taken == 0:
        raise LoraFormatError(
            f"{target}: was not written, since {_NAMES[host]} would take none of its "
            f"{counted(reading.modules, 'module')} in the {format} format.",
            hint="Choose a format that the host reads: sigmascope lora inspect IN says what each makes of the file.",
        )


def loads_in_words(path: Path) -> str:
    """Such as "diffusers 30 of 30 × 1, ComfyUI 22 of 22 × 1"; "unverified" with the reason where it is not known."""
    try:
        with open_any_kind(path, check_finite=False) as lora:
            if file_family(lora).family == "lbm":
                return f"into an LBM here, {len(lora.names)} of {counted(len(lora.names), 'module')}"
        loads = loads_of(path)
    except LoraFormatError as error:
        return f"unverified: {error.message}"
    return ", ".join(f"{_NAMES[name]} {_in_words(reading)}" for name, reading in loads.items())


def _in_words(reading: HostReading) -> str:
    said = []
    for part in reading.parts:
        if part.taken is None:
            said.append(f"unverified ({part.unavailable.get('taken', 'unknown')})")
        else:
            strength = f" × {strengths_in_words(part)}" if part.taken else ""
            said.append(f"{part.taken} of {part.modules}{strength}")
    return " and ".join(said)
