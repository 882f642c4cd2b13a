"""A family more: one file, and what the others cost and say does not change."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sigmascope
from sigmascope.lora.families import FAMILIES, Family, known
from sigmascope.lora.families.known import RowIndex

RECORD = '''
"""A made-up family."""

from sigmascope.lora.families.family import Family

MADE_UP = Family(
    name="made_up",
    title="Made-up",
    architecture="made-up-2",
    base_version="made_up_2",
    signatures={"diffusers": "strange_in.weight strange_blocks.0.look.to_q.weight"},
    layers="""
        odd_blocks.#.look = strange_blocks.#.look.to_q, strange_blocks.#.look.to_k
        strange_in
    """,
    blocks="""
        strange_in
        odd_blocks.# = strange_blocks
        strange_blocks.#
    """,
)
'''
USE = """
import torch
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import layout_of
from sigmascope.lora.file import LoraFile, family_in
from sigmascope.lora.layer_names import block_of_module
from sigmascope.lora.module_names import parse_names

def lora(name):
    return LoraFile({name: LoraFactors(torch.zeros(8, 1), torch.zeros(1, 4), 1.0, (8, 4))}, format="kohya")

print(parse_names(lora("lora_unet_odd_blocks_3_look")).layers["lora_unet_odd_blocks_3_look"])
print(parse_names(lora("lora_unet_odd_blocks_3_look")).layout.family)
print(layout_of({"transformer.strange_in.weight": (4, 4), "transformer.strange_blocks.0.look.to_q.weight": (4, 4)}).family)
print(block_of_module("odd_blocks.3.look"), block_of_module("lora_unet_strange_blocks_3_look_to_q"))
print(family_in({"modelspec.architecture": "Made.Up.2-turbo/lora"}))
"""


@pytest.mark.slow
def test_a_family_is_one_file(tmp_path: Path) -> None:
    package = tmp_path / "sigmascope"
    shutil.copytree(Path(sigmascope.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "lora" / "families" / "made_up.py").write_text(RECORD)

    def said(*arguments: str) -> str:
        environment = {"PYTHONPATH": str(tmp_path), "PATH": "", "COLUMNS": "400"}
        run = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=True
        )
        return run.stdout

    assert said("-c", USE).split("\n")[:5] == [
        "denoiser.odd_blocks.3.look",
        "made_up",
        "made_up",
        "strange_blocks.3 strange_blocks.3",
        "made_up",
    ]
    assert "made_up" in said("-m", "sigmascope", "lora", "convert", "--help")


def everything(families: list[Family]) -> tuple[object, ...]:
    """All that is derived from the records."""
    index = RowIndex({family.name: family.rows for family in families})
    return (
        index.by_original,
        index.by_part,
        index.by_flat,
        known.parts_by_encoder(families),
        known.encoder_parts(families),
        known.shown_blocks(families),
        known.flow(families),
        known.by_header(families),
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_order_of_the_records_has_no_meaning(seed: int) -> None:
    families = list(FAMILIES.values())
    expected = everything(families)
    random.Random(seed).shuffle(families)
    assert everything(families) == expected


def test_no_two_families_write_one_flat_name_differently() -> None:
    dotted: dict[str, set[str]] = {}
    for family in FAMILIES.values():
        for row in family.rows:
            names = {row.original, *row.parts}
            for name in names:
                assert dotted.setdefault(name.replace(".", "_"), names) & {name}


def test_who_differs_on_an_encoder_s_part_needs_one_that_decides() -> None:
    made_up = Family("a", "A", "a", "a", encoders={"text_encoder_2": ("gemma2_2b",)})
    with pytest.raises(ValueError, match="gemma2_2b is text_encoder and text_encoder_2"):
        known.parts_by_encoder([*FAMILIES.values(), made_up])


class Counting(dict[str, dict[str, object]]):
    """A table that counts how often it is asked."""

    asked = 0

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
        Counting.asked += 1
        return super().get(key, default)


@pytest.fixture
def count() -> type[Counting]:
    Counting.asked = 0
    return Counting


@pytest.mark.parametrize("more", [0, 50])
def test_a_look_up_asks_as_often_with_many_families_as_with_few(more: int, count: type[Counting]) -> None:
    made_up = {f"made_up_{number}": FAMILIES["flux"].rows for number in range(more)}
    index = RowIndex({"flux": FAMILIES["flux"].rows, **made_up})
    for name in ("by_original", "by_part", "by_flat", "_having"):
        setattr(index, name, count(getattr(index, name)))
    assert index.original("flux", "double_blocks.3.img_attn.proj") is not None
    assert index.part("flux", "transformer_blocks.3.attn.to_out.0") is not None
    assert index.dotted("double_blocks_3_img_attn_proj") == "double_blocks.3.img_attn.proj"
    assert len(index.tables_with("double_blocks.3.img_attn.proj")) == 1 + more
    assert count.asked == 7
