"""Whether a written LoRA file is taken by the hosts that its format is for: "written" means "loads".

`loads_of_written` gives the one answer that commands and functions show. It is that of `hosts.host_readings`, whose rules
are measured on the hosts' own loaders, and, inside `pipeline.lora_loading.held_to_installed`, that of the installed diffusers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
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


@dataclass(frozen=True, slots=True)
class InstalledReading:
    """What the installed diffusers makes of a file's modules for the denoiser, or for text encoders.

    Attributes:
        version: Of diffusers; None if it is not installed, or nobody looked.
        modules: How many the file has.
        taken: How many of them its loader puts, with all their factors, on layers that the family's class has; None if it
            was not asked, or cannot be.
        layers: How many layers of the class they change; None likewise.
        lost: The others' names.
        reason: Why `taken` is None, or why the loader takes none of the modules.
        family: The family whose pipelines were asked.
        encoders: The same of the modules for text encoders; None if the file has none, or it was not asked.
    """

    version: str | None
    modules: int
    taken: int | None
    layers: int | None = None
    lost: tuple[str, ...] = ()
    reason: str | None = None
    family: str | None = None
    encoders: "InstalledReading | None" = None

    @property
    def parts(self) -> "tuple[InstalledReading, ...]":
        """The readings of the denoiser's modules and of the text encoders', where the file has any."""
        encoders = () if self.encoders is None else (self.encoders,)
        return (self, *encoders) if self.modules or not encoders else encoders

    @property
    def in_words(self) -> str:
        """Such as "30 of 30 and text encoder 72 of 72"."""
        return " and ".join(
            f"{'text encoder ' if part is self.encoders else ''}{part.taken} of {part.modules}"
            for part in self.parts
        )

    def as_dict(self) -> dict[str, Any]:
        """The reading as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class WrittenLoads:
    """What a LoRA that was written loads into.

    Attributes:
        stated: By our statement of the hosts' rules.
        installed: By the installed diffusers; its `reason` says why it was not asked.
    """

    stated: Loads
    installed: InstalledReading

    @property
    def in_words(self) -> str:
        """Such as "diffusers 30 of 30 × 1, ComfyUI 22 of 22 × 1; diffusers 0.42.1 itself: 30 of 30"."""
        own, installed = self.stated.in_words, self.installed
        if installed.taken is not None:
            why = f" ({installed.reason})" if installed.reason and not self._says(installed.reason) else ""
            return f"{own}; diffusers {installed.version} itself: {installed.in_words}{why}"
        is_asked_for = "diffusers" in self.stated.hosts and installed.version is None
        return f"{own}; not held to an installed diffusers ({installed.reason})" if is_asked_for else own

    def _says(self, reason: str) -> bool:
        return any(reason in reading.unavailable.values() for reading in self.stated.hosts.values())

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return self.stated.as_dict() | {"installed_diffusers": self.installed.as_dict()}


ASK_INSTALLED: ContextVar[Callable[[Path, Loads], InstalledReading] | None] = ContextVar(
    "ASK_INSTALLED", default=None
)
"""What asks the installed diffusers, which this room does not import; None outside `held_to_installed`."""


def loads_of_written(path: Path) -> WrittenLoads:
    """Say what a LoRA file loads into, by the statement and by the installed diffusers where something asks it.

    Raises:
        CheckpointError: The file is damaged.
    """
    stated, ask = stated_loads(path), ASK_INSTALLED.get()
    if ask is not None:
        return WrittenLoads(stated, ask(path, stated))
    reading = stated.hosts.get("diffusers")
    modules = 0 if reading is None else reading.modules
    return WrittenLoads(stated, InstalledReading(None, modules, None, reason="nothing asked it"))


def stated_loads(path: Path) -> Loads:
    """What hosts make of a file by our statement of their rules; a file of another kind has the reason.

    Raises:
        CheckpointError: The file is damaged.
    """
    try:
        with open_lora(path, check_finite=False, allow_broken=True) as lora:
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


def require_loadable(written: Path, *, target: Path, format: str) -> WrittenLoads:
    """Refuse a file of which the host that its format is for would take nothing.

    Args:
        written: The file, before it takes the target's place.
        target: That place, for the error.
        format: The format that it was written in.

    Returns:
        What the file loads into.

    Raises:
        LoraFormatError: The host takes none of its modules, or the installed diffusers does not.
    """
    loads, host = loads_of_written(written), _HOST_OF_FORMAT.get(format)
    if host is not None and (why := _why_dead(loads, host)) is not None:
        raise LoraFormatError(
            f"{target}: was not written, since {why} in the {format} format.",
            hint="Choose a format that the host reads: sigmascope lora inspect IN says what each makes of the file.",
        )
    return loads


def is_taken(path: Path, format: str) -> bool:
    """Whether the host that a format is for takes something of a file, or may, as far as is known.

    Raises:
        CheckpointError: The file is damaged.
    """
    host = _HOST_OF_FORMAT.get(format)
    return host is None or _why_dead(loads_of_written(path), host) is None


def _why_dead(loads: WrittenLoads, host: str) -> str | None:
    """Why a host takes nothing of a file; None if it takes something, if that is not known, or if it has no loader."""
    reading, installed = loads.stated.hosts.get(host), loads.installed
    if reading is not None and "loader" in reading.unavailable:
        return None
    if reading is not None and _takes_nothing(reading.parts):
        why = f": {refused}" if (refused := reading.unavailable.get("refused")) else ""
        return f"{_NAMES[host]} would take none of its {_count_of(reading.parts)}{why}"
    if host == "diffusers" and _takes_nothing(installed.parts):
        why = f" ({installed.reason})" if installed.reason else ""
        return f"diffusers {installed.version} takes none of its {_count_of(installed.parts)}{why}"
    return None


def _takes_nothing(parts: Sequence[HostReading] | Sequence[InstalledReading]) -> bool:
    return any(part.modules for part in parts) and all(part.taken == 0 for part in parts)


def _count_of(parts: Sequence[HostReading] | Sequence[InstalledReading]) -> str:
    return counted(sum(part.modules for part in parts), "module")


def loads_in_words(path: Path) -> str:
    """`Loads.in_words` of a file."""
    return stated_loads(path).in_words


def _in_words(reading: HostReading) -> str:
    said = []
    for part in reading.parts:
        whose = "text encoder " if part is reading.encoders else ""
        if part.taken is None:
            said.append(f"{whose}unverified ({part.unavailable.get('taken', 'unknown')})")
        else:
            strength = f" × {strengths_in_words(part)}" if part.taken else ""
            reason = f" ({part.unavailable['loader']})" if "loader" in part.unavailable else ""
            said.append(f"{whose}{part.taken} of {part.modules}{strength}{reason}")
    return " and ".join(said)
