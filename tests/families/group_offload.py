"""Where diffusers can move groups of layers."""

from importlib.metadata import version
from typing import Final

import pytest
import torch
from packaging.version import Version

OFFLOADS_GROUPS: Final = Version(version("diffusers")) >= Version("0.41") or torch.accelerator.is_available()


def needs_group_offload() -> None:
    """Skip the test that calls this where diffusers fails to move groups of layers between CPU and CPU."""
    if not OFFLOADS_GROUPS:
        pytest.skip("diffusers before 0.41 offloads groups only where torch has an accelerator")
