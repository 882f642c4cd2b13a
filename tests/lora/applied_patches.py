"""Changes as hosts hold them, and the dense sums that they are compared with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sigmascope.probes.applied_patch import AppliedPatch

MakePatch = Callable[..., AppliedPatch]


@pytest.fixture
def randn() -> Callable[..., torch.Tensor]:
    """Random float32 tensors, the same in each run."""
    generator = torch.Generator().manual_seed(7)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.fixture
def make_patch() -> MakePatch:
    """A change as ComfyUI would hold it: make_patch("lora", up=…, down=…, strength=0.5)."""

    def make(kind: Any, key: str = "a.weight", **fields: Any) -> AppliedPatch:
        known = {name: fields.pop(name) for name in list(fields) if name in AppliedPatch.__dataclass_fields__}
        given: dict[str, Any] = {
            "patch_type": "unknown",
            "data_type": "<class 'comfy.weight_adapter.Adapter'>",
            "state": "registered",
            "tensors": fields,
        }
        return AppliedPatch(key, kind, **(given | known))

    return make
