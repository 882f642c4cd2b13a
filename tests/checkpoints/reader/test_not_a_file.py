"""What users name in place of a file of weights."""

from pathlib import Path

import pytest

from sigmascope import open_checkpoint
from sigmascope.errors import CheckpointError


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("https://huggingface.co/org/model", "org/model"),
        ("https://huggingface.co/org/model/resolve/main/model.safetensors", "org/model"),
        ("hf://org/model", "org/model"),
        ("https://example.com/lora.safetensors", "Download it first"),
    ],
)
def test_an_address_is_told_from_a_path(given: str, hint: str) -> None:
    with pytest.raises(CheckpointError, match="is an address") as raised:
        open_checkpoint(Path(given))  # as the command line gives it
    assert hint in str(raised.value.hint)


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["__0_0.distcp", "__1_0.distcp", ".metadata"], "PyTorch's distributed checkpoint"),
        (["zero_to_fp32.py", "latest", "global_step10/mp_rank_00_model_states.pt"], "DeepSpeed"),
    ],
)
def test_shards_of_a_training_are_named_with_what_joins_them(
    tmp_path: Path, files: list[str], kind: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=kind) as raised:
        open_checkpoint(tmp_path)
    assert "Join it: python" in str(raised.value.hint)
