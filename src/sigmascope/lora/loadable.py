"""Whether a written LoRA file is taken by the hosts that its format is for: "written" means "loads".

The answer is that of `hosts.host_readings`, whose rules are measured on the hosts' own loaders.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sigmascope.errors import LoraFormatError
from sigmascope.lora.file_family import file_family, title_of
from sigmascope.lora.hosts import HOSTS, HostReading, host_readings, strengths_in_words
from sigmascope.lora.reader import open_lora
from sigmascope.units import counted

_HOST_OF_FORMAT: Final = {"peft": "diffusers", "comfyui": "comfyui", "kohya": "comfyui"}
"""What a format is written for; native files are for what reads the model's own names."""
_NAMES: Final = {"diffusers": "diffusers", "comfyui": "ComfyUI"}


Check = Callable[[Path], str | None]
ALSO_ASKED: ContextVar[Check | None] = ContextVar("ALSO_ASKED", default=None)
"""Who else says why a file is dead, such as the installed diffusers, which this room does not import; None if it is not."""


@dataclass(frozen=True, slots=True)
class Loads:
    """What the newest version of each host makes of a file.

    Attributes:
        family: That the file is for; None if it is not known.
        doubt: Why the family is a guess; None if it is certain or not known.
        hosts: The readings by the host's name; none of a file for an LBM, or that cannot be judged.
        own_modules: How many modules our reader takes of a file for an LBM; None for any other.
        reason: Why no host is judged.
    """

    family: str | None = None
    doubt: str | None = None
    hosts: Mapping[str, HostReading] = field(default_factory=dict)
    own_modules: int | None = None
    reason: str | None = None

    @property
    def in_words(self) -> str:
        """Such as "diffusers 30 of 30 × 1, ComfyUI 22 of 22 × 1"; "unverified" with the reason where it is not known."""
        if self.own_modules is not None:
            return f"into an LBM here, {self.own_modules} of {counted(self.own_modules, 'module')}"
        if self.reason is not None:
            return f"unverified: {self.reason}"
        said = ", ".join(f"{_NAMES[name]} {_in_words(reading)}" for name, reading in self.hosts.items())
        return f"{said}, if it is for {title_of(self.family)}: {self.doubt}" if self.doubt else said

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "family": self.family,
            "family_doubt": self.doubt,
            "lbm_modules": self.own_modules,
            "unverified": self.reason,
            **{name: reading.as_dict() for name, reading in self.hosts.items()},
        }


def stated_loads(path: Path) -> Loads:
    """What hosts make of a file by our statement of their rules; a file of another kind has the reason.

    Raises:
        CheckpointError: The file is damaged.
    """
    try:
        with open_lora(path, check_finite=False) as lora:
            told, count = file_family(lora), len(lora.names)
        if told.family == "lbm":
            return Loads("lbm", told.doubt, own_modules=count)
        return Loads(told.family, told.doubt, loads_of(path))
    except LoraFormatError as error:  # kinds of changes that the readings leave out
        return Loads(reason=error.message)


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
    why = None
    if reading.modules and reading.taken == 0 and "loader" not in reading.unavailable:
        why = f"{_NAMES[host]} would take none of its {counted(reading.modules, 'module')}"
    elif host == "diffusers" and (also := ALSO_ASKED.get()) is not None:
        why = also(written)
    if why is not None:
        raise LoraFormatError(
            f"{target}: was not written, since {why} in the {format} format.",
            hint="Choose a format that the host reads: sigmascope lora inspect IN says what each makes of the file.",
        )


def loads_in_words(path: Path) -> str:
    """`Loads.in_words` of a file."""
    return stated_loads(path).in_words


def _in_words(reading: HostReading) -> str:
    said = []
    for part in reading.parts:
        if part.taken is None:
            said.append(f"unverified ({part.unavailable.get('taken', 'unknown')})")
        else:
            strength = f" × {strengths_in_words(part)}" if part.taken else ""
            reason = f" ({part.unavailable['loader']})" if "loader" in part.unavailable else ""
            said.append(f"{part.taken} of {part.modules}{strength}{reason}")
    return " and ".join(said)
