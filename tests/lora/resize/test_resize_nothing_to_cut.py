"""A budget for a LoRA of which nothing can be cut."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sigmascope.errors import ConfigError
from sigmascope.lora.budget import Budget
from sigmascope.lora.ranks import FixedRank, RankRules
from sigmascope.lora.resize import RankPlan, resize_lora


@pytest.mark.parametrize("budget", [Budget(max_bytes=30_000), Budget(max_error=0.05)])
def test_a_budget_for_a_lora_of_dora_alone_is_refused(tmp_path: Path, budget: Budget) -> None:
    module = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    tensors = {
        f"{module}.lora_A.weight": torch.randn(4, 32),
        f"{module}.lora_B.weight": torch.randn(32, 4),
        f"{module}.lora_magnitude_vector.weight": torch.rand(32) + 0.5,
    }
    save_file(tensors, tmp_path / "dora.safetensors")
    plan = RankPlan(RankRules(FixedRank(4, 4)), budget)
    with pytest.raises(
        ConfigError,
        match=r"no module of this LoRA has one that may be cut.*lora merge with --base_model_path",
    ):
        resize_lora(tmp_path / "dora.safetensors", tmp_path / "small.safetensors", plan)
    assert not (tmp_path / "small.safetensors").exists()
