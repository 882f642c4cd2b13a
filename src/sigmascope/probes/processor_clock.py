"""How fast the processors' clocks run, and how warm they are: a slower clock makes the same work take longer.

Linux tells both through files (Documentation/admin-guide/pm/cpufreq.rst, Documentation/driver-api/thermal/sysfs-api.rst).
Virtual machines and containers often have neither.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sigmascope.probes.reading import Reading, describe

_POLICIES: Final = Path("/sys/devices/system/cpu/cpufreq")
_ZONES: Final = Path("/sys/class/thermal")
_OF_PROCESSOR: Final = re.compile(r".*(cpu|pkg).*", re.IGNORECASE)
_NO_SUCH_SYSTEM: Final = "only Linux tells the clock of its processors"
_NO_FILES: Final = "the system tells no clock of its processors, as most virtual machines and containers do not: there is no {}"


@dataclass(frozen=True, slots=True)
class ProcessorClock:
    """A look at the processors.

    Attributes:
        gigahertz: Of the one whose clock ran fastest: one that does nothing slows down by itself.
        celsius: Of the warmest sensor of a processor; None: there is none.
    """

    gigahertz: float
    celsius: float | None = None


def processor_clock(policies: Path = _POLICIES, zones: Path = _ZONES) -> Reading[ProcessorClock]:
    """The clock and the warmth of now, or the reason why the clock cannot be read. One file for each clock is read.

    Args:
        policies: The folder of cpufreq's policies.
        zones: The folder of thermal zones.
    """
    if not sys.platform.startswith("linux"):
        return Reading(None, _NO_SUCH_SYSTEM)
    files = sorted(policies.glob("policy*/scaling_cur_freq"))
    if not files:
        return Reading(None, _NO_FILES.format(policies / "policy*/scaling_cur_freq"))
    try:
        kilohertz = max(int(file.read_text()) for file in files)
    except (OSError, ValueError) as failure:
        return Reading(None, describe(failure))
    if kilohertz <= 0:
        return Reading(None, f"{files[0].parent} tells a clock of {kilohertz} kHz")
    return Reading(ProcessorClock(kilohertz / 1e6, _warmest(zones)))


def _warmest(zones: Path) -> float | None:
    degrees = []
    for zone in zones.glob("thermal_zone*"):
        try:
            if _OF_PROCESSOR.fullmatch((zone / "type").read_text().strip()):
                degrees.append(int((zone / "temp").read_text()) / 1000)
        except (OSError, ValueError):  # a sensor that is switched off
            continue
    return max(degrees, default=None)
