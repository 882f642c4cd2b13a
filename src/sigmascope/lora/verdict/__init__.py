"""Whether a LoRA file is for a model, module by module, and which of its modules are really on one."""

from sigmascope.lora.verdict.applied_verdict import AppliedModule, AppliedVerdict
from sigmascope.lora.verdict.judging import judge_lora
from sigmascope.lora.verdict.judging_applied import judge_applied
from sigmascope.lora.verdict.lora_verdict import LoraVerdict
from sigmascope.lora.verdict.module_verdict import ModuleVerdict, Reason

__all__ = [
    "AppliedModule",
    "AppliedVerdict",
    "LoraVerdict",
    "ModuleVerdict",
    "Reason",
    "judge_applied",
    "judge_lora",
]
