"""Work that leaves files behind, small enough to be done by the hundred, and what is to be in them afterwards."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import chdir
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file
from tests.lbm.training.small_run import SmallRun, write_small_run
from torch import Tensor

from sigmascope.lbm.training.checkpoints import read_state
from sigmascope.lbm.training.train import TrainReport, train
from sigmascope.lora.budget import Budget
from sigmascope.lora.checkpoint_merge import merge_into_checkpoint
from sigmascope.lora.convert import convert_lora
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.merge import CombineOptions, merge_lora_files
from sigmascope.lora.ranks import FixedRank, RankRules
from sigmascope.lora.resize import RankPlan, resize_lora
from sigmascope.monitor import Recorder
from sigmascope.records.run import Run
from sigmascope.records.serialization import load_run, save_run
from sigmascope.reports.trace import write_trace

_SHAPES: list[tuple[int, ...]] = [(48, 64), (16, 4, 3, 3), (64, 40), (4, 8, 3, 3), (40, 40), (120, 96)]
_LAYERS = 24
_STEPS = 5
_SESSION = re.compile(r"run-until-[0-9]+(-[0-9]+)?\.json")
"""The record of a part of a training that was broken off, which an undisturbed one has not."""

Contents = Mapping[str, str]
"""A digest of each file by its name, or a word for one that is whole and has no other to be compared with."""


@dataclass(frozen=True)
class Job:
    """One kind of work in the working directory.

    Attributes:
        name: In the table.
        run: Does it. Done again after it was broken off, it goes on or begins anew.
        before: Does it in another way, which leaves what the work then replaces; None: it never replaces anything.
        passes: Does it and leaves also what the work only has on its way; None: nothing.
    """

    name: str
    run: Callable[[], object]
    before: Callable[[], object] | None = None
    passes: Callable[[], object] | None = None


def jobs(folder: Path) -> list[Job]:
    """Each with its inputs in `folder`."""
    base, tuned = _write_models(folder)
    loras = [folder / "first.safetensors", folder / "second.safetensors"]
    extract_lora(base, tuned, loras[0], ExtractOptions(rank=8, conv_rank=4))
    extract_lora(tuned, base, loras[1], ExtractOptions(rank=6, conv_rank=3))
    small = write_small_run(folder)
    target = "lora.safetensors"

    def extract(rank: int, workers: int | None = None) -> None:
        extract_lora(base, tuned, target, ExtractOptions(rank=rank, conv_rank=4, workers=workers))

    def to_a_size() -> None:
        extract_lora(base, tuned, target, ExtractOptions(budget=Budget(max_bytes=60_000), format="kohya"))

    def resize(rank: int) -> None:
        resize_lora(loras[0], target, _plan(rank))

    def merge(weight: float) -> None:
        merge_lora_files(loras, target, CombineOptions(weights=(weight, 0.5), plan=_plan(5)))

    def bake(weight: float) -> None:
        merge_into_checkpoint(loras, base, "model.safetensors", weights=(weight, 0.5))

    def convert(layout: str) -> None:
        convert_lora(loras[0], target, layout)

    runs = [_run(folder, steps) for steps in (300, 500)]
    return [
        Job("extract", partial(extract, 8), partial(extract, 2)),
        Job("extract alone", partial(extract, 8, 1), partial(extract, 2)),
        Job("extract to a size", to_a_size, partial(extract, 2)),
        Job("resize", partial(resize, 3), partial(resize, 2)),
        Job("merge", partial(merge, 0.7), partial(merge, 0.2)),
        Job("bake", partial(bake, 0.7), partial(bake, 0.2)),
        Job("convert", partial(convert, "kohya"), partial(convert, "peft")),
        Job("train", partial(_train, small, 2), passes=partial(_train, small, _STEPS)),
        Job("save", partial(save_run, runs[0], "saved.json"), partial(save_run, runs[1], "saved.json")),
        Job(
            "export",
            partial(write_trace, runs[:1], "trace.json"),
            partial(write_trace, runs[1:], "trace.json"),
        ),
    ]


def _write_models(folder: Path) -> tuple[Path, Path]:
    generator = torch.Generator().manual_seed(0)
    base: dict[str, Tensor] = {}
    tuned: dict[str, Tensor] = {}
    for number in range(_LAYERS):
        shape = _SHAPES[number % len(_SHAPES)]
        rows, columns = shape[0], int(torch.Size(shape[1:]).numel())
        change = torch.randn(rows, 12, generator=generator) @ torch.randn(12, columns, generator=generator)
        key = f"denoiser.down_blocks.1.attentions.0.transformer_blocks.{number}.attn1.to_q.weight"
        base[key] = torch.randn(shape, generator=generator)
        tuned[key] = base[key] + 0.1 * change.reshape(shape)
    save_file(base, folder / "base_model.safetensors")
    save_file(tuned, folder / "tuned_model.safetensors")
    return folder / "base_model.safetensors", folder / "tuned_model.safetensors"


def _plan(rank: int) -> RankPlan:
    return RankPlan(RankRules(FixedRank(rank, rank)))


def _train(small: SmallRun, keep: int) -> TrainReport:
    keys = {"save_ckpt_path": "out", "max_steps": _STEPS, "save_interval": 1, "keep_checkpoints": keep}
    return train(small.settings(**keys, ema_decay=0.9))


def _run(folder: Path, steps: int) -> Run:
    recorder = Recorder("portrait", sample_hz=None, step_memory=False)
    with recorder, recorder.stage("denoising") as stage:
        for _ in range(steps):
            with recorder.step():
                pass
        stage.fact("steps", steps)
    path = folder / f"of_{steps}_steps.json"
    save_run(recorder.run(), path)
    return load_run(path)


def contents(folder: Path) -> Contents:
    """What the files in a folder hold, those of temporary names and journals left aside; all have to be whole.

    Raises:
        SigmascopeError, SafetensorError, ValueError: A file is not whole.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    held = {
        str(path.relative_to(folder)): _read(path)
        for path in files
        if not _is_hidden(path.relative_to(folder))
    }
    return {name: digest for name, digest in held.items() if not _SESSION.fullmatch(Path(name).name)}


def leftovers(folder: Path) -> list[str]:
    """The other files and folders."""
    return sorted(str(path) for path in folder.rglob("*") if _is_hidden(path.relative_to(folder)))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read(path: Path) -> str:
    if path.parent.name.startswith("checkpoint-"):
        read_state(path.parent)  # compares every file with its digest
    if path.suffix == ".safetensors":
        load_file(path)
    elif path.name in ("run.json", "saved.json") or _SESSION.fullmatch(path.name):
        load_run(path)
        if path.name == "run.json":
            return "a run"  # which tells times, and those are never the same again
    elif path.suffix == ".json":
        json.loads(path.read_text())
    elif path.name.endswith(
        "_config.yaml"
    ):  # a side-car names its models from where it is, which is elsewhere each time
        facts = yaml.safe_load(path.read_text())
        assert {"base_model", "tuned_model"} <= facts.keys()
        return json.dumps(
            {name: facts[name] for name in facts.keys() - {"base_model", "tuned_model"}}, sort_keys=True
        )
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents_of(work: Callable[[], object], folder: Path) -> Contents:
    """What the work leaves in an empty folder when nothing goes wrong."""
    folder.mkdir(parents=True)
    with chdir(folder):
        work()
    assert leftovers(folder) == []
    return contents(folder)


def check_versions(now: Contents, *versions: Contents) -> None:
    """Require that every file that is there is as in one of the versions.

    Raises:
        AssertionError: One is of none.
    """
    for name, digest in now.items():
        assert digest in [version.get(name) for version in versions], f"{name} is of no version"


def check_same(now: Contents, expected: Contents) -> None:
    """Require the same files with the same in them.

    Raises:
        AssertionError: Names those that differ.
    """
    different = [name for name in sorted({*now, *expected}) if now.get(name) != expected.get(name)]
    assert not different, f"differs: {', '.join(different)}"
