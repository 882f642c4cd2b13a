"""What is read of a device, with a stand-in for it."""

from collections.abc import Mapping

import pytest
from tests.pipeline.optimized import CPU, H100, T4

from sigmascope.pipeline.optimization_plan import Hardware, read_hardware
from sigmascope.probes.accelerators import NullAccelerator
from sigmascope.records.memory import AcceleratorMemory
from sigmascope.records.run import AcceleratorFacts


class TwoDevices(NullAccelerator):
    """Two devices with 3 GB free of 8, of which the allocator holds 1 GB without using it."""

    kind = "cuda"
    absence = ""

    def __init__(self) -> None:
        super().__init__("")

    def device_count(self) -> int:
        return 2

    def devices(self) -> list[str]:
        return ["cuda:0", "cuda:1"]

    def current_device(self) -> str | None:
        return "cuda:0"

    def memory(self, device: str) -> AcceleratorMemory:
        return AcceleratorMemory(device, 2_000, 3_000, 8_000, 3_000, 5_000)

    def facts(self, device: str) -> AcceleratorFacts:
        return AcceleratorFacts(device, f"name of {device}", 8_000, "550.1", "8.6")

    def unavailable(self, device: str) -> Mapping[str, str]:
        return {}


def test_the_current_device_is_read() -> None:
    found = read_hardware(accelerator=TwoDevices())
    assert (found.device, found.name, found.total_bytes, found.capability) == (
        "cuda:0", "name of cuda:0", 8_000, (8, 6)
    )  # fmt: skip


def test_an_amd_device_has_an_architecture_in_place_of_a_capability() -> None:
    class Amd(TwoDevices):
        def facts(self, device: str) -> AcceleratorFacts:
            return AcceleratorFacts(device, "AMD Radeon RX 6600", 8_000, "6.7.0", "gfx1032")

    found = read_hardware(accelerator=Amd())
    assert (found.capability, found.architecture) == (None, "gfx1032")
    assert not found.multiplies_bfloat16()


def test_what_the_allocator_holds_unused_counts_as_free() -> None:
    assert read_hardware(accelerator=TwoDevices()).free_bytes == 4_000


def test_another_device_can_be_asked_for() -> None:
    assert read_hardware("cuda:1", TwoDevices()).name == "name of cuda:1"


def test_the_cpu_can_be_asked_for_beside_a_device() -> None:
    found = read_hardware("cpu", TwoDevices())
    assert (found.device, found.is_accelerator, found.total_bytes) == ("cpu", False, None)


def test_without_a_device_the_reason_is_kept() -> None:
    found = read_hardware(accelerator=NullAccelerator("no accelerator: none was plugged in"))
    assert (found.device, found.absence) == ("cpu", "no accelerator: none was plugged in")


MI300 = Hardware("cuda:0", architecture="gfx942:sramecc+:xnack-")
RX_6600 = Hardware("cuda:0", architecture="gfx1032")


@pytest.mark.parametrize(
    ("hardware", "multiplies"),
    [(H100, True), (T4, False), (CPU, False), (Hardware("cuda:0"), True), (MI300, True), (RX_6600, False)],
)
def test_bfloat16_is_multiplied_from_ampere_on(hardware: Hardware, multiplies: bool) -> None:
    assert hardware.multiplies_bfloat16() is multiplies


@pytest.mark.parametrize(
    ("capability", "multiplies"), [((9, 0), True), ((8, 9), True), ((8, 6), False), (None, False)]
)
def test_float8_is_multiplied_from_ada_on(capability: tuple[int, int] | None, multiplies: bool) -> None:
    assert Hardware("cuda:0", capability=capability).multiplies_float8() is multiplies
