"""What is found out once a process: its accelerator, and the machine."""

from functools import cache

from sigmascope.probes import Accelerator, detect_accelerator, host_facts
from sigmascope.records.host import HostFacts


@cache
def accelerator_of_this_process() -> Accelerator:
    """What torch would use, found out once."""
    return detect_accelerator()


_host_facts: dict[int, tuple[Accelerator, HostFacts]] = {}


def facts_of_host(accelerator: Accelerator) -> HostFacts:
    """Facts about this machine, read once for each accelerator object."""
    known = _host_facts.get(id(accelerator))
    if known is not None:
        return known[1]
    facts = host_facts(accelerator)
    # A device's facts may be hidden until the host initialises it; such an answer is asked for again.
    if all(device.name is not None for device in facts.accelerators):
        _host_facts.clear()
        _host_facts[id(accelerator)] = (accelerator, facts)
    return facts
