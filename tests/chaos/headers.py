"""Headers of LoRA files changed at random: names, shapes, dtypes, offsets and metadata of every kind of change.

What is read is held to the bytes of the file, which a parser of the header written here finds; so a file that is accepted
with numbers that it does not hold is a failure, and so is a traceback.
"""

import json
import random
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tests.chaos.made_files import State, _dora, _kohya, _loha, _lokr, _tucker, _whole
from tests.chaos.mutations import _edit_header, _resize_tensor, written
from tests.chaos.openers import (
    Refused,
    Trial,
    _command,
    _maybe_json,
    _products_in,
    _require_close,
    check_message,
)
from tests.chaos.tries import MB, Case, Kind
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import SigmascopeError
from sigmascope.lora.adapters import Adapter, DoraChange, WeightChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.inspect import inspect_lora
from sigmascope.lora.reader import open_lora

_NAME: Final = "transformer_blocks.0.attn.to_q"
_ENDS: Final[Mapping[str, Mapping[str, tuple[int, ...]]]] = {
    "peft": {"lora_A.weight": (4, 8), "lora_B.weight": (12, 4)},
    "dora by peft": {"lora_A.weight": (4, 8), "lora_B.weight": (12, 4), "lora_magnitude_vector": (12,)},
    "lora-xs": {
        "lora_A.weight": (4, 8),
        "lora_B.weight": (12, 4),
        "default_lora_latent_mapping.weight": (4, 4),
    },
    "oft": {"oft_blocks": (3, 4, 4), "alpha": (), "rescale": (12, 1)},
    "oft of flux": {"oft_blocks.0": (2, 3, 3), "oft_blocks.1": (2, 3, 3), "alpha": ()},
    "oft by peft": {"oft_R.weight": (2, 6)},
    "boft": {"oft_blocks": (2, 3, 4, 4), "alpha": ()},
    "boft by peft": {"boft_R": (2, 2, 4, 4), "boft_s": (12, 1)},
    "glora": {
        "a1.weight": (8, 2),
        "a2.weight": (2, 8),
        "b1.weight": (12, 2),
        "b2.weight": (2, 8),
        "alpha": (),
    },
    "ia3": {"weight": (12,), "on_input": ()},
    "ia3 by peft": {"ia3_l": (12, 1)},
    "hra": {"hra_u": (8, 4)},
    "vera": {"vera_lambda_b": (12,), "vera_lambda_d": (4,)},
}
_TYPES: Final = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "I64": 8,
    "I32": 4,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


def _states() -> Iterator[State]:
    yield from (make() for make in (_kohya, _loha, _lokr, _tucker, _dora, _whole))
    for kind, ends in _ENDS.items():
        state = {f"{_NAME}.{end}": torch.randn(shape) for end, shape in ends.items()}
        if kind == "vera":
            state |= {"vera_A": torch.randn(4, 8), "vera_B": torch.randn(12, 4)}
        yield state | {f"single.{end}": torch.randn(shape).half() for end, shape in ends.items()}


def _rename(data: bytes, rng: random.Random, _marker: str) -> bytes:
    """Give a tensor the end of another kind's key."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = rng.choice([name for name in header if name != "__metadata__"])
    end = rng.choice([end for ends in _ENDS.values() for end in ends])
    header[f"{name.rpartition('.')[0]}.{end}"] = header.pop(name)
    return _with(data, header, length)


def _exchange(data: bytes, rng: random.Random, _marker: str) -> bytes:
    """Exchange the offsets, the shapes or the dtypes of two tensors."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    first, second = (rng.choice([name for name in header if name != "__metadata__"]) for _ in range(2))
    field = rng.choice(("data_offsets", "shape", "dtype"))
    header[first][field], header[second][field] = header[second][field], header[first][field]
    return _with(data, header, length)


def _describe(data: bytes, rng: random.Random, _marker: str) -> bytes:
    """Put metadata in that readers look at."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = rng.choice(
        ("lora_adapter_metadata", "ss_network_dim", "ss_network_args", "format", "lbm_native_naming")
    )
    texts = (
        "",
        "4",
        "1e999",
        "{",
        "null",
        '{"r": 4}',
        '{"transformer.r": "x", "transformer.lora_alpha": -1}',
        "\ud800",
    )
    header["__metadata__"] = {name: rng.choice(texts)}
    return _with(data, header, length)


def _with(data: bytes, header: Any, length: int) -> bytes:
    text = written(header)
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


_CHANGES: Final = (_edit_header, _edit_header, _resize_tensor, _resize_tensor, _rename, _exchange, _describe)


def attempt(case: Case) -> str:
    rng, states = case.random, case.prepared
    file = Path("in.safetensors")
    save_file({key: tensor.contiguous() for key, tensor in rng.choice(states).items()}, file)
    data = file.read_bytes()
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        changed = rng.choice(_CHANGES)
        try:
            data = changed(data, rng, "")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error):
            continue  # what was changed before left nothing to change
        print(changed.__name__)  # noqa: T201
    file.write_bytes(data)
    try:
        stored = _read(file, data)
        _read_lora(file, stored)
        if rng.random() < 0.3:
            _command(Trial(file, rng), "lora", "inspect", file, *_maybe_json(Trial(file, rng)))
        else:
            json.dumps(inspect_lora(file).as_dict(), allow_nan=False)
        return "read rightly"
    except SigmascopeError as error:
        check_message(str(error), file)
    except Refused:
        pass
    return "refused"


def _read(file: Path, data: bytes) -> dict[str, bytes]:
    """Hold each tensor to the bytes that the header points at, and give these."""
    (length,) = struct.unpack("<Q", data[:8])
    with open_checkpoint(file) as checkpoint:
        header = json.loads(data[8 : 8 + length])
        stored = {}
        for key in checkpoint:
            entry, tensor = header[key], checkpoint.tensor(key)
            begin, end = entry["data_offsets"]
            stored[key] = data[8 + length + begin : 8 + length + end]
            assert len(stored[key]) == end - begin, f"{key} lies outside the file"
            assert list(tensor.shape) == entry["shape"], f"{key}: shape {tuple(tensor.shape)}"
            if entry["dtype"] in _TYPES:
                assert tensor.dtype.itemsize == _TYPES[entry["dtype"]], f"{key}: {tensor.dtype}"
                assert _bytes(tensor) == stored[key], f"{key} was read wrongly"
    return stored


def _read_lora(file: Path, stored: Mapping[str, bytes]) -> None:
    """Each tensor of each change is one of the file's, and plain products are what its factors give."""
    with open_lora(file, check_finite=False, keep_float8=True) as lora:
        theirs = _products_in(file)
        numbers = {} if theirs is None else {key: tensor.double() for key, tensor in load_file(file).items()}
        assert not set(lora.unused_keys) - set(stored) - set(lora.metadata), "an unused key that is not there"
        for name in lora.names:
            change: Any = lora.change(name)
            if lora.kind_of(name) == "lora_xs":
                parts = [
                    _of(numbers, name, end) for end in ("lora_B", "default_lora_latent_mapping", "lora_A")
                ]
                if all(part is not None and bool(torch.isfinite(part).all()) for part in parts):
                    up, latent, down = parts
                    ours = change.up.double() @ change.down.double()
                    _require_close(ours, up @ latent @ down, name)
                continue
            for tensor in _tensors(change):
                assert _bytes(tensor) in stored.values(), f"{name}: {tuple(tensor.shape)} is not in the file"
            product = (theirs or {}).get(name)
            finite = product is not None and bool(torch.isfinite(product).all())
            if finite and product is not None and isinstance(change, LoraFactors):
                ours = change.delta(torch.float64).flatten(1)
                _require_close(ours, product.reshape(ours.shape), name)


def _of(numbers: State, name: str, end: str) -> Any:
    return next((tensor for key, tensor in numbers.items() if key.startswith(f"{name}.{end}.")), None)


def _tensors(change: LoraFactors | WeightChange) -> Iterator[Tensor]:
    if isinstance(change, LoraFactors):
        yield from (change.up, change.down)
    elif isinstance(change, DoraChange):
        yield from (*_tensors(change.direction), change.magnitude)
    elif isinstance(change, Adapter):
        yield from change.parts.values()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _prepare(_folder: Path) -> list[State]:
    torch.manual_seed(0)
    return list(_states())


KIND = Kind(
    "headers",
    "a LoRA's changed header gives a clear error, or exactly the numbers that the file holds",
    tries=10_000,
    attempt=attempt,
    prepare=_prepare,
    seconds=10.0,
    memory=1024 * MB,
)
