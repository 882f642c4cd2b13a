"""Every command that works on a device, on one that is pretended: it writes what it writes on the CPU."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.conftest import Pretend
from tests.families import make_pipeline
from tests.families.loras import lora_state
from tests.lbm.conftest import save_tiny_pair
from tests.pretend_device import Kind

from sigmascope.cli.root import run
from sigmascope.lora.reader import load_lora
from sigmascope.lora.statistics import load_statistics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An LBM, one that was tuned from it, a LoRA between them, a picture, and a pipeline with a LoRA."""
    folder = tmp_path_factory.mktemp("inputs")
    save_tiny_pair(folder)
    (folder / "pictures").mkdir()
    Image.effect_mandelbrot((64, 64), (-2, -1, 1, 1), 60).convert("RGB").save(folder / "pictures" / "a.png")
    pipeline = make_pipeline("sd15")
    pipeline.save_pretrained(folder / "tiny-sd")
    save_file(lora_state(pipeline, ["unet"], size=0.6), folder / "style.safetensors")
    models = (
        "--base_model_path",
        folder / "base.safetensors",
        "--tuned_model_path",
        folder / "tuned.safetensors",
    )
    assert command(
        "lora", "extract", *models, "--rank", 2, "--conv_rank", 2, "--device", "cpu",
        "--save_to", folder / "lora.safetensors",
    ) == 0  # fmt: skip
    return folder


def command(*arguments: object) -> int:
    """Run a command in this process, and give its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sigmascope", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            run()
    return int(stopped.value.code or 0)


@dataclass(frozen=True)
class Command:
    """A command line.

    Attributes:
        line: `IN` is the folder of inputs, `OUT` one of its own for what is written.
        writes: The file that is compared, below `OUT`.
        backward: Whether it takes gradients.
        within: How far what it writes may be from the CPU's, as a share of the largest value.
    """

    line: str
    writes: str
    backward: bool = False
    within: float = 0.0


MODELS = "--base_model_path IN/base.safetensors --tuned_model_path IN/tuned.safetensors"
LEVEL = 1 / 255  # attention is summed up in another order than on the CPU
SMALL = "--size 64x64"
COMMANDS = {
    "lora extract": Command(
        f"lora extract {MODELS} --rank 4 --conv_rank 4 --save_to OUT/l.safetensors",
        "l.safetensors",
        within=1e-4,
    ),
    "lora extract at a rank of full size": Command(
        f"lora extract {MODELS} --rank 9999 --save_to OUT/l.safetensors", "l.safetensors"
    ),
    "lora statistics": Command(
        f"lora statistics IN/tuned.safetensors --noise 1 {SMALL} --save_to OUT/s.safetensors",
        "s.safetensors",
        backward=True,
        within=2**-7,  # directions are kept in bfloat16
    ),
    "lora statistics through a pipeline": Command(
        "lora statistics IN/tiny-sd --noise 1 --size 32x32 --save_to OUT/s.safetensors",
        "s.safetensors",
        backward=True,
        within=2**-7,  # directions are kept in bfloat16
    ),
    "lora statistics of calls": Command(
        "lora statistics IN/tiny-sd --noise 1 --size 32x32 --num_inference_steps 2 --through calls --save_to OUT/s.safetensors",
        "s.safetensors",
        backward=True,
        within=2**-7,  # directions are kept in bfloat16
    ),
    "lora fit": Command(
        f"lora fit IN/lora.safetensors {MODELS} --noise 3 {SMALL} --steps 3 --gradient_accumulation_steps 1 --save_to OUT/f.safetensors",
        "f.safetensors",
        backward=True,
        within=2**-10,  # a LoRA is kept in float16
    ),
    "lora validate": Command(
        f"lora validate IN/lora.safetensors {MODELS} --images IN/pictures --min_success_rate 0 --picture OUT/v.svg --json",
        "stdout.json",
        within=1e-5,
    ),
    "lora grid": Command(
        "lora grid IN/tiny-sd --lora IN/style.safetensors --prompt fox --scales 1 -o OUT/g.png --steps 1 --resolution 32 --dtype float32 --json",
        "stdout.json",
        within=1e-4,
    ),
    "lbm infer": Command(
        "lbm infer --base_model_path IN/base.safetensors --lora_path IN/lora.safetensors --source_image IN/pictures/a.png --output_path OUT/o.png --num_inference_steps 2 --seed 1 --torch_dtype float32",
        "o.png",
        within=LEVEL,
    ),
    "lbm infer in tiles": Command(
        "lbm infer --base_model_path IN/base.safetensors --source_image IN/pictures/a.png --output_path OUT/o.png --size 128x128 --tile_size 64 --torch_dtype float32",
        "o.png",
        within=LEVEL,
    ),
}


Written = dict[str, torch.Tensor]


def written(line: str, device: str, inputs: Path, folder: Path, writes: str, capsys: Any) -> Written:
    folder.mkdir()
    arguments = line.replace("IN/", f"{inputs}/").replace("OUT/", f"{folder}/").split()
    capsys.readouterr()
    code = command(*arguments, "--device", device)
    told = capsys.readouterr()
    assert code == 0, told.err
    if writes == "stdout.json":
        return {"images": torch.tensor(figures(json.loads(told.out)))}
    path = folder / writes
    if writes == "s.safetensors":
        return moments_of(path)
    if writes == "l.safetensors":  # the sign of a column of both factors is free
        return {name: factors.delta() for name, factors in load_lora(path).modules.items()}
    if path.suffix == ".safetensors":
        tensors: Written = load_file(path)
        return tensors
    return {"picture": torch.from_numpy(np.asarray(Image.open(path)).copy())}


def moments_of(statistics: Path) -> dict[str, torch.Tensor]:
    """Each layer's matrices: what is kept of one as directions turns with the last bit."""
    kept = {}
    for name, layer in load_statistics(statistics).items():
        for side, moments in (("inputs", layer.inputs), ("outputs", layer.outputs)):
            matrix = moments.full
            if moments.low_rank is not None:
                columns = moments.low_rank.double()
                matrix = moments.diagonal.double().diag() + columns @ columns.mT
            assert matrix is not None
            kept[f"{name}.{side}"] = matrix
    return kept


def leave_out_times(told: dict[str, Any]) -> list[Any]:
    return [part for name, part in told.items() if "seconds" not in name]


def figures(told: Any) -> list[float]:
    if isinstance(told, dict | list):
        return [
            figure
            for part in (leave_out_times(told) if isinstance(told, dict) else told)
            for figure in figures(part)
        ]
    return [told] if isinstance(told, float) else []


@pytest.fixture(scope="module")
def on_the_cpu(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Any], Written]:
    """What a command writes on the CPU: both kinds of device are held to one run of it."""
    kept: dict[str, Written] = {}

    def of(name: str, capsys: Any) -> Written:
        if name not in kept:
            asked, folder = COMMANDS[name], tmp_path_factory.mktemp("cpu") / "out"
            kept[name] = written(asked.line, "cpu", inputs, folder, asked.writes, capsys)
        return kept[name]

    return of


def test_extraction_on_metal_is_refused_by_name(
    pretend: Pretend, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = COMMANDS["lora extract"].line.replace("IN/", f"{inputs}/").replace("OUT/", f"{tmp_path}/")
    with pretend("mps"):
        assert command(*line.split(), "--device", "mps") == 2
    assert "--device mps cannot be used" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


RUNS = [
    (name, kind)
    for name in COMMANDS
    for kind in ("cuda", "mps")
    if not (kind == "mps" and name.startswith("lora extract"))
]


def test_an_extraction_by_statistics_is_the_cpus(
    pretend: Pretend, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert written(COMMANDS["lora statistics"].line, "cpu", inputs, tmp_path / "by", "s.safetensors", capsys)
    line = f"{COMMANDS['lora extract'].line} --statistics {tmp_path}/by/s.safetensors"
    expected = written(line, "cpu", inputs, tmp_path / "cpu", "l.safetensors", capsys)
    with pretend("cuda"):
        made = written(line, "cuda", inputs, tmp_path / "cuda", "l.safetensors", capsys)
    for name, change in made.items():
        torch.testing.assert_close(change, expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "kind"), RUNS)
def test_it_writes_what_it_writes_on_the_cpu(
    pretend: Pretend,
    name: str,
    kind: Kind,
    inputs: Path,
    on_the_cpu: Callable[[str, Any], Written],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked, expected = COMMANDS[name], on_the_cpu(name, capsys)
    with pretend(kind, backward=asked.backward):
        made = written(asked.line, kind, inputs, tmp_path / kind, asked.writes, capsys)
    assert made.keys() == expected.keys()
    for key, tensor in made.items():
        scale = float(expected[key].double().abs().max())
        assert float((tensor.double() - expected[key].double()).abs().max()) <= asked.within * scale, key
