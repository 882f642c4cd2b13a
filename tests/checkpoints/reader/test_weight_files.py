from pathlib import Path

import pytest

from sigmascope.checkpoints.reader import weight_files

PLAIN = "diffusion_pytorch_model.safetensors"
SHARDS = [
    "diffusion_pytorch_model-00001-of-00002.safetensors",
    "diffusion_pytorch_model-00002-of-00002.safetensors",
]
INDEX = f"{PLAIN}.index.json"


@pytest.mark.parametrize(
    ("names", "variant", "chosen"),
    [
        ([PLAIN, "diffusion_pytorch_model.fp16.safetensors"], None, PLAIN),
        ([PLAIN, INDEX, *SHARDS], None, PLAIN),
        ([INDEX, *SHARDS], None, INDEX),
        (["model.safetensors", PLAIN], None, "model.safetensors"),
        (["model.fp16.safetensors", "model.fp32.safetensors"], None, "model.fp32.safetensors"),
        (["model.ema.safetensors"], None, "model.ema.safetensors"),
        ([PLAIN, "model.fp16.safetensors"], "fp16", "model.fp16.safetensors"),
        (["model.safetensors.index.fp16.json", "model.fp16-00001-of-00001.safetensors"], "fp16", None),
        ([PLAIN], "fp16", ""),
        (["other.safetensors", *SHARDS, "model.safetensors.tmp", "config.json"], None, ""),
    ],
)
def test_the_file_that_a_folder_stands_for(
    tmp_path: Path, names: list[str], variant: str | None, chosen: str | None
) -> None:
    for name in names:
        (tmp_path / name).touch()
    found = weight_files(tmp_path).choose(variant)
    assert ("" if found is None else found.name) == (names[0] if chosen is None else chosen)
