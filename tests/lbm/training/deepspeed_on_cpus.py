"""DeepSpeed on CPUs, over gloo, which DeepSpeed has and Accelerate keeps for accelerators.

Accelerate makes its state DeepSpeed's only where it is not told to stay on the CPU. Here that one decision is taken
for it; all else is its own and ours. As a script, run by torchrun with the environment that `accelerate launch
--use_deepspeed` sets, it is the command line.
"""

import warnings
from typing import Any, Final

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

ENVIRONMENT: Final = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_CONFIG_DS_FIELDS": "",
    "DS_ACCELERATOR": "cpu",
}
"""What `accelerate launch --use_deepspeed --zero_stage 2` sets (1.15), and DeepSpeed's own choice of the CPU."""
_made = AcceleratorState.__init__


def allow_deepspeed_on_cpus() -> None:
    """Let Accelerate use DeepSpeed in this process, for as long as it lives.

    What PyTorch deprecates in DeepSpeed's code and in its own compiler is not this project's to mend.
    """
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", FutureWarning)
    AcceleratorState.__init__ = _make


def _make(self: AcceleratorState, *args: Any, **keys: Any) -> None:
    _made(self, *args, **keys)
    plugin = keys.get("deepspeed_plugin")
    if plugin is not None:  # otherwise it only asks for the state that the first one made
        plugin.set_mixed_precision(keys["mixed_precision"])
        plugin.select(_from_accelerator_state=True)
        self.deepspeed_plugins = plugin
        self._mixed_precision = "no"
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED


if __name__ == "__main__":
    from sigmascope.cli import main

    allow_deepspeed_on_cpus()
    main()
