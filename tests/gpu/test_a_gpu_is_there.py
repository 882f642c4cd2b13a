"""What the other checks stand on."""

import pytest
import torch

from sigmascope.probes import detect_accelerator, memory_snapshot
from sigmascope.probes.nvml import GPU_ACTIVITY, nvml_memory

pytestmark = pytest.mark.gpu


def test_a_gpu_is_found_with_name_and_memory(cuda: torch.device) -> None:
    torch.ones(1, device=cuda)
    accelerator = detect_accelerator()
    assert accelerator.absence is None
    facts = accelerator.facts(str(cuda))
    assert facts.name == torch.cuda.get_device_name(cuda)
    assert facts.total_bytes == torch.cuda.get_device_properties(cuda).total_memory
    memory = memory_snapshot(accelerator).accelerator(str(cuda))
    assert memory.unavailable == {}


def test_pynvml_reads_it(cuda: torch.device) -> None:
    torch.ones(1, device=cuda)
    reading = nvml_memory(str(cuda))
    if torch.version.hip:  # NVML is NVIDIA's
        assert reading.value is None
        assert reading.reason
        return
    assert reading.value is not None, reading.reason
    free, total = torch.cuda.mem_get_info(cuda)
    assert reading.value[1] == pytest.approx(total, rel=0.05)
    assert abs(reading.value[0] - free) < 0.1 * total
    activity = GPU_ACTIVITY.read([str(cuda)])
    assert activity.value is not None, activity.reason
