"""The functions and commands that users open files with, and what an independent reader says of the same file.

Each takes a `Trial` and gives the names of the files that it made; it raises `SigmascopeError`, or `Refused` for a command that
ended with an error and told it well, or an `AssertionError` where a result is wrong.
"""

import contextlib
import io
import json
import math
import random
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import gguf
import numpy as np
import torch
import yaml
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from tests.chaos.made_files import LAYERS
from torch import Tensor, nn

import sigmascope
from sigmascope.analysis.diagnostics import diagnose
from sigmascope.checkpoints import Checkpoint, checkpoint_fingerprint, open_checkpoint
from sigmascope.cli import root
from sigmascope.errors import SigmascopeError
from sigmascope.lbm.config import LbmConfig, load_config
from sigmascope.lbm.data import DataOptions, TrainingData
from sigmascope.lbm.images import find_images, load_image
from sigmascope.lbm.model import load_lbm
from sigmascope.lbm.samples import decode_picture
from sigmascope.lbm.shards import read_shard
from sigmascope.lbm.training.settings import load_train_settings
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.checkpoint_merge import merge_into_checkpoint
from sigmascope.lora.compare import compare_loras
from sigmascope.lora.compatibility import judge_lora
from sigmascope.lora.convert import convert_lora
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.inspect import inspect_lora
from sigmascope.lora.live_merge import merge_into_model
from sigmascope.lora.merge import CombineOptions, merge_lora_files
from sigmascope.lora.ranks import FixedRank, RankRules
from sigmascope.lora.reader import load_lora
from sigmascope.lora.resize import RankPlan, resize_lora
from sigmascope.lora.validate import validate_lora
from sigmascope.records.serialization import CURRENT_SCHEMA, run_to_json

State = dict[str, Tensor]

_LONGEST_MESSAGE: Final = 12  # lines
_FULL = RankPlan(RankRules(FixedRank(64, 64)))
_OUT: Final = "out.safetensors"
_TYPES: Final = ("native", "kohya", "peft", "comfyui")
_REFERENCE_ERRORS = (
    SafetensorError,
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    TypeError,
    AttributeError,
    UnpicklingError,
)


@dataclass(frozen=True)
class Trial:
    """A damaged file in a folder of its own."""

    file: Path
    random: random.Random


def check_harmless(text: str) -> None:
    odd = {char for char in text if not char.isprintable() and char != "\n"}
    assert not odd, f"control characters in the output: {odd}"


def check_message(text: str, file: Path) -> None:
    check_harmless(text)
    assert text.count("\n") < _LONGEST_MESSAGE, f"an error of {text.count(chr(10)) + 1} lines"
    stem = file.name.partition(".")[0]
    names = (
        rf"\b{stem}\b",
        Path.cwd().name,
        *LAYERS,
        "--[a-z]",
        "_path names it",
        r"\.safetensors\b",
        "lora_unet",
        "The run ",
        r"\b(report_to|pixel_loss_type): ",  # settings that name a package
        "the shards",
    )
    assert any(re.search(name, text) for name in names), f"names nothing: {text[:300]}"


# The command line.


class Refused(Exception):
    """The command said that it cannot, as it should."""


def _command(trial: Trial, *arguments: object, findings: int | None = None) -> None:
    """Run a command in this process, on streams of any encoding, and judge what it printed.

    Args:
        trial: What it is run for.
        arguments: Of the command line.
        findings: The exit code that says that something was found, beside 0.

    Raises:
        Refused: It ended with an error, and told it well.
    """
    encoding = trial.random.choice(("utf-8", "cp1252", "ascii"))
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding, "strict") for _ in range(2))
    line = tuple(map(str, arguments))
    status: Any = 0
    before = sys.argv
    sys.argv = ["sigmascope", *line]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            root.run()
    except SystemExit as leaving:
        status = leaving.code or 0
    finally:
        sys.argv = before
    told, wrong = (_written_to(stream, encoding) for stream in (out, err))
    said = told + wrong
    print(line, status, ascii(said))  # noqa: T201
    assert "Traceback" not in said, "a traceback in the output"
    check_harmless(said)
    if "Error: " in wrong:
        assert status in (1, 2), f"exit status {status} after an error"
        check_message(wrong, trial.file)
        raise Refused
    assert status in (0, findings), f"exit status {status} without an error"
    if "--json" in line:
        json.loads(told, parse_constant=_no_constant)


def _written_to(stream: io.TextIOWrapper, encoding: str) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode(encoding)


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} in JSON output")


def _maybe_json(trial: Trial) -> tuple[str, ...]:
    return ("--json",) if trial.random.random() < 0.5 else ()


# Files of weights.


def _read_weights(trial: Trial) -> None:
    with open_checkpoint(trial.file) as checkpoint:
        ours = {name: checkpoint.tensor(name) for name in checkpoint}
        again = {name: checkpoint.tensor(name) for name in checkpoint}
        checkpoint_fingerprint(checkpoint)
        _require_equal(ours, again)
        for name, tensor in ours.items():
            assert tuple(tensor.shape) == checkpoint.info(name).shape, name
        theirs = _reference(checkpoint)
        if theirs is not None:
            same = {name: tensor for name, tensor in ours.items() if name not in checkpoint.dequantised}
            _require_equal(same, {name: theirs[name] for name in same})
            unread = set(theirs) - set(ours) - set(checkpoint.skipped)
            assert not {name for name in unread if "scale" not in name}, f"not read: {unread}"


def _reference(checkpoint: Checkpoint) -> State | None:
    """What another reader gives, where it reads the file at all."""
    path = checkpoint.path
    try:
        if checkpoint.format == "gguf":
            return {
                tensor.name: torch.from_numpy(_plain_gguf(tensor)) for tensor in gguf.GGUFReader(path).tensors
            }
        if checkpoint.format == "safetensors":
            tensors: State = load_file(path)
            return tensors
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        state = loaded.get("state_dict", loaded)
        before = "model." if state is not loaded else ""  # what Lightning puts before the names of its module
        return {
            str(name).removeprefix(before): value
            for name, value in state.items()
            if isinstance(value, Tensor)
        }
    except _REFERENCE_ERRORS:
        return None


def _plain_gguf(tensor: Any) -> np.ndarray:
    values: np.ndarray = np.array(tensor.data)
    return values


def _require_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        same = tensor.dtype == theirs[name].dtype and tensor.shape == theirs[name].shape
        assert same, f"{name}: {tensor.dtype} {tensor.shape}, not {theirs[name].dtype} {theirs[name].shape}"
        assert _bytes(tensor) == _bytes(theirs[name]), f"{name} was read wrongly"


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _extract(trial: Trial) -> list[str]:
    models = (trial.file, Path("tuned.safetensors"))
    if trial.random.random() < 0.5:
        models = (Path("base.safetensors"), trial.file)
    options = ExtractOptions(rank=4, conv_rank=4, save_precision="float", workers=1)
    report = extract_lora(models[0], models[1], _OUT, options)
    norms = sorted(module.delta_norm for module in report.modules)
    assert all(math.isfinite(norm) for norm in norms)
    factors = {name: tensor.double() for name, tensor in load_file(_OUT).items()}
    assert all(bool(torch.isfinite(tensor).all()) for tensor in factors.values())
    return [_OUT, "out_config.yaml"]


def _validate(trial: Trial) -> None:
    weights = ["base.safetensors", "tuned.safetensors", "other.safetensors"]
    weights[trial.random.randrange(2 if trial.file.suffix != ".pt" else 3)] = str(trial.file)
    base, tuned, lora = weights
    validate_lora(base, tuned, lora, workers=1)


def _bake_into(trial: Trial) -> list[str]:
    return _baked("other.safetensors", trial.file)


def _baked(lora: Path | str, into: Path | str) -> list[str]:
    merge_into_checkpoint([lora], into, _OUT)
    with open_checkpoint(into) as before, open_checkpoint(_OUT) as after:
        changed = [name for name in before if _bytes(before.tensor(name)) != _bytes(after.tensor(name))]
        assert len(changed) <= len(LAYERS) + 1, f"{changed} were changed"
    return [_OUT]


def _inspect_on(trial: Trial) -> None:
    _command(
        trial, "lora", "inspect", "other.safetensors", "--model", trial.file, *_maybe_json(trial), findings=1
    )


def _load_lbm(trial: Trial) -> None:
    config = Path(sigmascope.__file__).parent / "lbm/pocket/weights/config.yaml"
    load_lbm(trial.file, config)


def _command_extract(trial: Trial) -> list[str]:
    models = ("--base_model_path", trial.file, "--tuned_model_path", "tuned.safetensors")
    _command(
        trial, "lora", "extract", *models, "--save_to", _OUT, "--rank", 4, "--workers", 1, *_maybe_json(trial)
    )
    return [_OUT, "out_config.yaml"]


# LoRAs.


def _load(trial: Trial) -> None:
    lora = load_lora(trial.file)
    theirs = _products_in(trial.file)
    for name, factors in lora.modules.items():
        delta = factors.delta(torch.float64)
        if theirs is not None and name in theirs:
            _require_close(delta.flatten(1), theirs[name].reshape(delta.flatten(1).shape), name)
    for name, change in lora.changes.items():
        if change.kind not in ("dora", "set") and theirs is not None and name in theirs:
            delta = change.delta(None, torch.float64).flatten(1)
            _require_close(delta, theirs[name].reshape(delta.shape), name)


def _require_close(ours: Tensor, theirs: Tensor, name: str) -> None:
    error, norm = float((ours - theirs).norm()), float(theirs.norm())
    assert error <= 1e-5 * norm + 1e-300, f"{name}: {error} off in {norm}"


def _products_in(path: Path) -> State | None:
    """ΔW of each module, worked out from what safetensors or PyTorch reads; None where that reads nothing."""
    try:
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        state = {name: tensor.double() for name, tensor in state.items()}
    except _REFERENCE_ERRORS:
        return None
    products = {}
    for key, up in state.items():
        name, _, end = key.rpartition(".lora_up.weight")
        if name and not end and f"{name}.lora_mid.weight" not in state and f"{name}.dora_scale" not in state:
            down = state.get(f"{name}.lora_down.weight")
            if down is None:
                continue
            alpha = state.get(f"{name}.alpha", torch.tensor(float(down.shape[0])))
            products[name] = float(alpha) / down.shape[0] * (up.flatten(1) @ down.flatten(1))
        name = key.removesuffix(".hada_w1_a")
        if name != key and all(f"{name}.hada_{end}" in state for end in ("w1_b", "w2_a", "w2_b")):
            left, right = (state[f"{name}.hada_w{n}_a"] @ state[f"{name}.hada_w{n}_b"] for n in (1, 2))
            rank = state[f"{name}.hada_w1_b"].shape[0]
            products[name] = (
                float(state.get(f"{name}.alpha", torch.tensor(float(rank)))) / rank * left * right
            )
    return products


def _inspect(trial: Trial) -> None:
    report = inspect_lora(trial.file, full_spectrum=trial.random.random() < 0.3)
    json.dumps(report.as_dict(), allow_nan=False)
    theirs = _products_in(trial.file)
    for module in report.modules:
        if theirs and module.name in theirs and module.norm is not None:
            norm = float(theirs[module.name].norm())
            assert abs(module.norm - norm) <= 1e-4 * norm + 1e-30, f"{module.name}: {module.norm}, not {norm}"


def _resize(trial: Trial) -> list[str]:
    report = resize_lora(trial.file, _OUT, _FULL, save_precision="float")
    json.dumps(report.as_dict(), allow_nan=False)
    _require_same_changes(trial.file, report.error_norm if hasattr(report, "error_norm") else 0.0)
    return [_OUT]


def _require_same_changes(source: Path, error: float = 0.0) -> None:
    """What was written changes as much as what was read."""
    theirs, ours = _products_in(source), _products_in(Path(_OUT))
    assert ours is not None, "what was written cannot be read"
    for name in set(theirs or ()) & set(ours):
        before, after = float(theirs[name].norm()), float(ours[name].norm())  # type: ignore[index]
        assert abs(before - after) <= 1e-4 * before + error + 1e-30, f"{name}: {after}, not {before}"


def _convert(trial: Trial) -> list[str]:
    model = trial.random.choice((None, "base.safetensors"))
    family = "lbm" if model is None and trial.random.random() < 0.3 else None
    convert_lora(trial.file, _OUT, trial.random.choice(_TYPES), model=model, family=family)
    _require_same_changes(trial.file)
    return [_OUT]


def _combine(trial: Trial) -> list[str]:
    loras: list[Path | str] = ["other.safetensors", trial.file]
    trial.random.shuffle(loras)
    options = CombineOptions(weights=(1.0, 0.5), plan=_FULL, save_precision="float")
    report = merge_lora_files(loras, _OUT, options)
    json.dumps(report.as_dict(), allow_nan=False)
    assert load_file(_OUT)
    return [_OUT]


def _compare(trial: Trial) -> None:
    loras: list[Path | str] = [trial.file, trial.random.choice(("other.safetensors", trial.file))]
    report = compare_loras(*loras)
    json.dumps(report.as_dict(), allow_nan=False)
    if loras[0] == loras[1]:
        assert report.verdict == "same", "a file is not the same as itself"


def _validate_lora(trial: Trial) -> None:
    report = validate_lora("base.safetensors", "tuned.safetensors", trial.file, workers=1)
    json.dumps(report.as_dict(), allow_nan=False)


def _bake(trial: Trial) -> list[str]:
    return _baked(trial.file, "base.safetensors")


def _judge(trial: Trial) -> None:
    with open_checkpoint("base.safetensors") as model:
        judge_lora(trial.file, model)


class _Small(nn.Module):
    """Two of the small model's layers, under their names."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("denoiser.down_blocks.1.attentions.0.proj_in", "denoiser.time_embedding.linear_1"):
            rows, columns = LAYERS[name][:2]
            *parents, last = name.split(".")
            owner: nn.Module = self
            for parent in parents:
                if not hasattr(owner, parent):
                    owner.add_module(parent, nn.Module())
                owner = getattr(owner, parent)
            owner.add_module(last, nn.Linear(columns, rows))


def _apply(trial: Trial) -> None:
    torch.manual_seed(0)
    model = _Small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merges = trial.random.random() < 0.5
    try:
        lora = load_lora(trial.file)
        if merges:
            merge_into_model(model, lora, 0.5).unmerge()
        else:
            attach_lora(model, lora, 0.5).detach()
    finally:
        _require_equal(model.state_dict(), before)


def _command_lora(trial: Trial) -> list[str]:
    rng = trial.random
    as_json = _maybe_json(trial)
    kind = rng.randrange(7)
    if kind == 0:
        extra = rng.choice(((), ("--full_spectrum",), ("--verbose",), ("--model", "base.safetensors")))
        _command(trial, "lora", "inspect", trial.file, *extra, *as_json, findings=1)
    elif kind == 1:
        _command(trial, "lora", "diff", trial.file, "other.safetensors", *as_json, findings=1)
    elif kind == 2:
        _command(trial, "lora", "resize", trial.file, _OUT, "--rank", 1, "--conv_rank", 1, *as_json)
    elif kind == 3:
        _command(trial, "lora", "convert", trial.file, _OUT, "--format", rng.choice(_TYPES), *as_json)
    elif kind == 4:
        _command(
            trial, "lora", "merge", trial.file, "other.safetensors", "--save_to", _OUT, "--rank", 4, *as_json
        )
    elif kind == 5:
        _command(
            trial, "lora", "merge", trial.file, "--into", "base.safetensors", "--save_to", _OUT, *as_json
        )
    else:
        models = ("--base_model_path", "base.safetensors", "--tuned_model_path", "tuned.safetensors")
        names = ("--lora_path", trial.file, "--workers", 1)
        _command(trial, "lora", "validate", *models, *names, *as_json, findings=1)
        return [path.name for path in Path().glob("*.txt")]
    return [_OUT]


# Runs.


def _read_run(trial: Trial) -> list[str]:
    run = sigmascope.load_run(trial.file)
    diagnose(run)
    document = json.loads(trial.file.read_bytes())
    if document["schema"] == CURRENT_SCHEMA:
        _require_kept(document["run"], json.loads(run_to_json(run))["run"], "run")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run.print()
    check_harmless(said.getvalue())
    if trial.random.random() < 0.5:
        run.to_trace("trace.json")
        json.loads(Path("trace.json").read_text(), parse_constant=_no_constant)
        return ["trace.json"]
    run.save("again.json")
    assert run_to_json(sigmascope.load_run("again.json")) == run_to_json(run), "saved as another run"
    return ["again.json"]


def _require_kept(read: Any, kept: Any, place: str) -> None:
    if isinstance(read, dict):
        assert isinstance(kept, dict), f"{place} became {kept!r}"
        for key, value in read.items():
            assert key in kept, f"{place}.{key} was dropped"
            _require_kept(value, kept[key], f"{place}.{key}")
    elif isinstance(read, list):
        assert isinstance(kept, list | tuple), f"{place} became {kept!r}"
        assert len(kept) == len(read), f"{place} became {kept!r}"
        for number, value in enumerate(read):
            _require_kept(value, kept[number], f"{place}[{number}]")
    else:
        same = read == kept and isinstance(read, bool) == isinstance(kept, bool)
        assert same or (read != read and kept != kept), f"{place}: {read!r} became {kept!r}"


def _merge_runs(trial: Trial) -> None:
    merged = sigmascope.merge_runs([sigmascope.load_run(trial.file), sigmascope.load_run("other.json")])
    diagnose(merged)
    run_to_json(merged)


def _command_run(trial: Trial) -> list[str]:
    sides = [trial.file, "other.json"]
    trial.random.shuffle(sides)
    which = trial.random.choice((("compare", "--by_step"), ("compare",), ("check",), ("show",), ("show",)))
    if which != ("show",):
        _command(trial, *which, sides[0], "--baseline", sides[1], *_maybe_json(trial), findings=1)
        return []
    shown = trial.random.choice((sides, [trial.file]))
    ways = ((), ("--full",), ("--markdown",), ("--json",), ("--html", "page.html"), ("--trace", "trace.json"))
    way = trial.random.choice(ways)
    _command(trial, "show", *shown, *way, "--prompts", trial.random.choice(("full", "hash", "none")))
    return [way[1]] if len(way) > 1 else []


# Dumps.


def _read_dump(trial: Trial) -> None:
    dump = sigmascope.load_tensors(trial.file)
    theirs = _quietly(load_file, trial.file)
    if theirs is not None:
        _require_equal({name: dump[name] for name in dump if name in theirs}, {n: theirs[n] for n in dump})
    sigmascope.load_tensors(trial.file, as_numpy=trial.random.choice((True, "values", "bits")))


def _quietly(read: Callable[[Path], Any], path: Path) -> Any:
    try:
        return read(path)
    except _REFERENCE_ERRORS:
        return None


def _compare_dumps(trial: Trial) -> None:
    sides: list[Any] = [trial.file, "other.safetensors"]
    trial.random.shuffle(sides)
    comparison = sigmascope.compare_tensors(*map(sigmascope.load_tensors, sides))
    json.dumps(comparison.as_dict(), allow_nan=False)


def _command_dumps(trial: Trial) -> None:
    sides: list[Any] = [trial.file, "other.safetensors"]
    trial.random.shuffle(sides)
    _command(trial, "compare-tensors", *sides, *_maybe_json(trial), findings=1)


def _read_dump_folder(_trial: Trial) -> None:
    dumps = sigmascope.TensorDumps(Path.cwd())
    for name in dumps:
        whole = sigmascope.load_tensors(
            dumps.folder / next(each.file for each in dumps.index if each.name == name)
        )
        _require_equal({key: dumps[name][key] for key in dumps[name]}, {key: whole[key] for key in whole})
    assert {entry.file for entry in dumps.index} == {path.name for path in Path().glob("*.safetensors")}


# Pictures.


def _load_picture(trial: Trial) -> None:
    picture = load_image(trial.file)
    assert picture.mode == "RGB"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(trial.file) as theirs:
            theirs.load()
            plain = theirs.mode in ("RGB", "L") and not theirs.getexif() and "transparency" not in theirs.info
            if plain:
                assert np.array_equal(np.asarray(picture), np.asarray(theirs.convert("RGB"))), "other pixels"


def _find_pictures(trial: Trial) -> None:
    shutil.rmtree("pictures", ignore_errors=True)
    found, unreadable = find_images(trial.file.parent)
    assert len(found) + len(unreadable) == 1
    for unread in unreadable:
        assert unread.reason


def _decode_picture(trial: Trial) -> None:
    try:
        decode_picture(trial.file.read_bytes())
    except SigmascopeError as error:
        check_message(f"in {error}", trial.file)  # bytes have no name; their sample's is put before it


def _command_shards(trial: Trial) -> list[str]:
    folder = Path("pairs")
    folder.mkdir()
    for role in ("source", "target"):
        shutil.copy(trial.file, folder / f"in_{role}{trial.file.suffix}")
    try:
        _command(trial, "lbm", "make-shards", folder, "shards", *_maybe_json(trial))
    finally:
        shutil.rmtree(folder)
    return [str(path) for path in Path("shards").rglob("*")]


# Shards.


def _read_shard(trial: Trial) -> None:
    data = trial.file.read_bytes()
    is_packed = data.startswith(b"\x1f\x8b")
    for sample in read_shard(str(trial.file), ("source", "target")):
        for name, member in sample.members.items():
            assert is_packed or member in data, f"{name} is not in the file"
        assert sample.key is not None or sample.fault


def _train_on(trial: Trial) -> None:
    config = LbmConfig(vae_num_channels=4, unet_input_channels=4)
    options = DataOptions((str(trial.file),), 1, workers=0, size=(64, 64))
    for batch, _ in TrainingData(config, options).batches(0):
        for tensor in (batch.source, batch.target):
            assert bool(torch.isfinite(tensor).all())
            assert float(tensor.abs().max()) <= 1.0


# Configs.


def _read_config(trial: Trial) -> None:
    config = load_config(trial.file)
    _require_values(trial.file, config)
    yaml.safe_load(config.to_yaml())


def _read_settings(trial: Trial) -> None:
    _require_values(trial.file, load_train_settings(trial.file))


def _require_values(file: Path, config: Any) -> None:
    data = yaml.safe_load(file.read_text())
    for key, value in (data or {}).items():
        if isinstance(value, int | float | str) and hasattr(config, str(key)):
            kept = getattr(config, key)
            kept = str(kept) if isinstance(kept, Path) else kept[0] if isinstance(kept, tuple) else kept
            is_empty = kept is None and not str(value).strip()  # an empty text is none
            same = is_empty or kept == value or str(kept) == str(value) or (kept != kept and value != value)
            assert same, f"{key}: {value!r} became {kept!r}"


def _command_config(trial: Trial) -> list[str]:
    _command(trial, "lbm", "train", "--path_config", trial.file, "--dry_run")
    return []


OPENERS: Final[dict[str, tuple[Callable[[Trial], list[str] | None], ...]]] = {
    "lora": (
        _load,
        _inspect,
        _resize,
        _convert,
        _combine,
        _compare,
        _validate_lora,
        _bake,
        _judge,
        _apply,
        _command_lora,
        _command_lora,
        _command_lora,
    ),
    "weights": (
        _read_weights,
        _read_weights,
        _extract,
        _validate,
        _bake_into,
        _inspect_on,
        _load_lbm,
        _command_extract,
    ),
    "index": (_read_weights, _inspect_on, _load_lbm),
    "run": (_read_run, _read_run, _merge_runs, _command_run),
    "dump": (_read_dump, _compare_dumps, _command_dumps),
    "dump folder": (_read_dump_folder,),
    "picture": (_load_picture, _find_pictures, _decode_picture, _command_shards),
    "shard": (_read_shard, _train_on),
    "config": (_read_config, _read_settings, _command_config),
}
