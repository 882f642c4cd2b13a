"""A LoRA format more: its class in `formats.py` and one line, its name."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sigmascope
from sigmascope.lora.formats import FORMATS, group_keys, recognised

SHOUTED = """

SHOUTED = LoraFormat(
    name="shouted",
    used_by="nobody",
    writable=frozenset({"diffusers"}),
    recognises=lambda groups: any(name.startswith("LOUD!") for name in groups.groups),
    usual_naming="diffusers",
    module_name=lambda part, path, layout, prefix: f"LOUD!{path}",
)
"""
USE = """
import torch
from sigmascope import convert_lora, load_lora
from safetensors.torch import save_file
name = "transformer.transformer_blocks.0.attn.to_q"
save_file({f"{name}.lora_A.weight": torch.ones(1, 4), f"{name}.lora_B.weight": torch.ones(4, 1)}, "peft.safetensors")
convert_lora("peft.safetensors", "shouted.safetensors", "shouted", family="flux")
lora = load_lora("shouted.safetensors")
print(lora.format, *lora.modules)
"""


@pytest.mark.slow
def test_a_format_is_its_class_and_its_name(tmp_path: Path) -> None:
    package = tmp_path / "sigmascope"
    shutil.copytree(Path(sigmascope.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    formats, names = package / "lora" / "formats.py", package / "lora" / "format_names.py"
    before = formats.read_text()
    formats.write_text(before.replace("FORMATS: Final = ", f"{SHOUTED}\nFORMATS: Final = "))
    names.write_text(names.read_text().replace('"comfyui"]', '"comfyui", "shouted"]'))

    def said(*arguments: str) -> str:
        environment = {"PYTHONPATH": str(tmp_path), "PATH": "", "COLUMNS": "200", "NO_COLOR": "1"}
        run = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
            check=True,
        )
        return run.stdout

    assert "shouted" in said("-m", "sigmascope", "lora", "extract", "--help")
    assert said("-c", USE) == "shouted LOUD!transformer_blocks.0.attn.to_q\n"


@pytest.mark.parametrize(
    ("name", "ending", "format"),
    [
        ("lora_unet_double_blocks_0_img_attn_proj", "lora_down.weight", "kohya"),
        ("lora_unet_double_blocks_0_img_attn_proj", "lora_A.weight", "kohya"),
        ("diffusion_model.double_blocks.0.img_attn.proj", "lora_A.weight", "comfyui"),
        ("transformer.transformer_blocks.0.attn.to_q", "lora_A.weight", "peft"),
        ("base_model.model.transformer_blocks.0.attn.to_q", "lora_down.weight", "peft"),
        ("denoiser.conv_in", "lora_down.weight", "native"),
    ],
)
def test_one_format_at_most_recognises_a_file_whatever_the_order(name: str, ending: str, format: str) -> None:
    keys = [f"{name}.{ending}"]
    groups = group_keys(Path("lora"), keys)
    assert recognised(Path("lora"), dict.fromkeys(keys, (1,)), groups).name == format
    claims = [one.name for one in FORMATS if one.recognises(groups) and not one.takes_rest]
    assert claims == ([] if format == "native" else [format])
