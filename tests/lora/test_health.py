"""`inspect_lora` on sound files of many kinds, and on the same files with a planted fault."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.lora.inspect import inspect_lora
from sigmascope.records.run import Finding

BLOCKS = 8
WIDTH = 48
LAYERS = ("attn1_to_q", "ff_net_2")
PLACES = list(product(range(BLOCKS), LAYERS))[:13]

Fault = Callable[[dict[str, Tensor], str], None]


def module(block: int, layer: str) -> str:
    return f"lora_unet_mid_block_attentions_0_transformer_blocks_{block}_{layer}"


def sound_file(
    seed: int, *, rank: int = 8, spread: float = 0.5, decay: float = 0.0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Factors of 16 modules whose sizes differ log-normally by `spread`, and whose directions fall off by `decay`."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    fall = torch.arange(1, rank + 1) ** -decay
    for block, layer in product(range(BLOCKS), LAYERS):
        size = 0.02 * torch.exp(spread * torch.randn((), generator=generator))
        name = module(block, layer)
        tensors[f"{name}.lora_up.weight"] = (torch.randn(WIDTH, rank, generator=generator) * fall * size).to(
            dtype
        )
        tensors[f"{name}.lora_down.weight"] = (
            torch.randn(rank, 2 * WIDTH, generator=generator) / WIDTH**0.5
        ).to(dtype)
        tensors[f"{name}.alpha"] = torch.tensor(rank / 2)
    return tensors


def found(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Finding]:
    save_file(tensors, folder / "lora.safetensors")
    health = ("damaged", "spikes", "over_strong", "rank_collapse", "dead_modules", "not_finite")
    findings = inspect_lora(folder / "lora.safetensors").findings
    return {one.id: one for one in findings if one.id.removeprefix("lora_") in health}


def spike(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}.lora_up.weight"][:, 0] *= 400.0


def strong(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}.alpha"] *= 400.0


def dead(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}.lora_up.weight"] *= 1e-5


def collapsed(tensors: dict[str, Tensor], name: str) -> None:
    up = tensors[f"{name}.lora_up.weight"]
    length = up.norm()
    up[:, 1:] *= 1e-3
    up *= length / up.norm()


def not_a_number(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}.lora_down.weight"][3, 7] = float("nan")


def infinite(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}.lora_up.weight"][5, 2] = float("-inf")


def flipped_exponent(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}.lora_down.weight"][2, 11] = 1e6


def lost_bytes(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}.lora_down.weight"].view(-1)[101:251] = 0.0


FAULTS: dict[Fault, str] = {
    spike: "lora_spikes",
    strong: "lora_over_strong",
    dead: "lora_dead_modules",
    collapsed: "lora_rank_collapse",
    not_a_number: "lora_not_finite",
    infinite: "lora_not_finite",
    flipped_exponent: "lora_damaged",
    lost_bytes: "lora_damaged",
}


def missed(folder: Path, fault: Fault, id: str, places: Sequence[tuple[int, str]]) -> list[str]:
    """Places of the fault where it is not the one thing that is said."""
    wrong: list[str] = []
    for seed, (block, layer) in enumerate(places):
        tensors = sound_file(seed)
        fault(tensors, module(block, layer))
        told = found(folder, tensors)
        if list(told) != [id] or module(block, layer) not in str(told[id].evidence["first"]):
            wrong.append(f"{block} {layer}: {[one.message for one in told.values()]}")
    return wrong


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_all_that_is_found(tmp_path: Path, fault: Fault) -> None:
    assert missed(tmp_path, fault, FAULTS[fault], PLACES[:1]) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_are_found_in_every_layer(tmp_path: Path, fault: Fault) -> None:
    assert missed(tmp_path, fault, FAULTS[fault], PLACES) == []


def test_a_whole_strong_block_is_told_as_one(tmp_path: Path) -> None:
    inner = "mid_block_attentions_0_transformer_blocks"
    tensors = {key.replace(inner, "transformer_blocks"): value for key, value in sound_file(3).items()}
    for key in tensors:
        if "transformer_blocks_2" in key and key.endswith("alpha"):
            tensors[key] *= 200.0
    (told,) = found(tmp_path, tensors).values()
    assert (told.id, told.evidence["blocks"]) == ("lora_over_strong", 1)
    assert "transformer_blocks.2, the whole block" in str(told.evidence["first"])


def test_a_layer_that_spikes_in_every_block_is_told(tmp_path: Path) -> None:
    tensors = sound_file(0, spread=0.0)
    for block in range(BLOCKS):
        spike(tensors, module(block, LAYERS[1]))
    (told,) = found(tmp_path, tensors).values()
    assert (told.id, told.evidence["modules"]) == ("lora_spikes", BLOCKS)


def test_a_nan_is_told_with_its_key_and_place(tmp_path: Path) -> None:
    tensors = sound_file(0)
    key = f"{module(4, LAYERS[0])}.lora_down.weight"
    tensors[key][3, 7] = tensors[key][5, 1] = float("nan")
    told = found(tmp_path, tensors)["lora_not_finite"]
    assert told.evidence["where"] == f"{key}, 2 of 768 numbers from [3, 7]"


KINDS = list(product((4, 16), (0.0, 0.5, 1.0), (0.0, 0.7), (torch.float32, torch.float16, torch.bfloat16)))


def alarms(folder: Path, kinds: Sequence[tuple[int, float, float, torch.dtype]], seeds: int) -> list[str]:
    return [
        f"rank {rank}, spread {spread}, decay {decay}, {dtype}, seed {seed}: {one.message}"
        for (rank, spread, decay, dtype), seed in product(kinds, range(seeds))
        for one in found(
            folder, sound_file(seed, rank=rank, spread=spread, decay=decay, dtype=dtype)
        ).values()
    ]


def test_sound_files_raise_no_alarm(tmp_path: Path) -> None:
    assert alarms(tmp_path, KINDS[::5], 1) == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, 16])
def test_many_sound_files_raise_no_alarm(tmp_path: Path, rank: int) -> None:
    assert alarms(tmp_path, [kind for kind in KINDS if kind[0] == rank], 6) == []


def test_parts_left_out_of_fused_matrices_are_no_damage(tmp_path: Path) -> None:
    tensors = sound_file(1)
    for key in tensors:
        if key.endswith("lora_up.weight"):
            tensors[key][WIDTH // 3 : 2 * WIDTH // 3] = 0.0
    assert found(tmp_path, tensors) == {}


def test_beside_modules_that_do_nothing_no_others_are_too_strong(tmp_path: Path) -> None:
    """Five of the eight blocks' attention was not trained: the other three are no reason for burnt images."""
    tensors = sound_file(0)
    for block in range(5):
        tensors[f"{module(block, LAYERS[0])}.lora_up.weight"] *= 1e-6
    assert set(found(tmp_path, tensors)) == {"lora_dead_modules"}
