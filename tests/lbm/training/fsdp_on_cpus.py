"""FSDP on CPUs, over gloo, which PyTorch has and Accelerate keeps for accelerators.

Accelerate makes its state FSDP's only where it finds a GPU or the like. Here that one decision is taken for it; all else
is its own and ours. As a script, run by torchrun with the environment that `accelerate launch --use_fsdp` sets, it is the
command line.
"""

from typing import Any, Final

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

ENVIRONMENT: Final = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
"""What `accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP` sets (1.15)."""
_made = AcceleratorState.__init__


def allow_fsdp_on_cpus() -> None:
    """Let Accelerate use FSDP in this process, for as long as it lives."""
    AcceleratorState.__init__ = _make


def _make(self: AcceleratorState, *args: Any, **keys: Any) -> None:
    _made(self, *args, **keys)
    if "fsdp_plugin" in keys:  # otherwise it only asks for the state that the first one made
        self.fsdp_plugin = keys["fsdp_plugin"]
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


if __name__ == "__main__":
    from sigmascope.cli import main

    allow_fsdp_on_cpus()
    main()
