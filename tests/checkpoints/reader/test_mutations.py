"""Over a thousand damaged safetensors files: each gives one clear error, none a crash, a hang or an allocation."""

import json
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import CheckpointError

SOUND = save(
    {
        "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "a.bias": torch.arange(5, dtype=torch.bfloat16),
        "step": torch.tensor(3, dtype=torch.int64),
        "void": torch.empty(0, 2),
    },
    {"format": "pt"},
)
HEADER_BYTES = int.from_bytes(SOUND[:8], "little")
DATA = SOUND[8 + HEADER_BYTES :]
HEADER: dict[str, Any] = json.loads(SOUND[8 : 8 + HEADER_BYTES])


def with_header(header: object, data: bytes = DATA) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def with_field(name: str, field: str, value: object) -> bytes:
    return with_header({**HEADER, name: {**HEADER[name], field: value}})


def truncated() -> Iterator[tuple[str, bytes]]:
    lengths = sorted({*range(24), *range(24, len(SOUND), 4), len(SOUND) - 1})
    for length in lengths:
        yield f"cut-{length}", SOUND[:length]


def lying_lengths() -> Iterator[tuple[str, bytes]]:
    lies = [0, 1, 2, HEADER_BYTES - 8, HEADER_BYTES + 8, len(SOUND) - 8, len(SOUND) - 7, len(SOUND)]
    for lie in [*lies, *(2**bits for bits in range(10, 64, 3)), 2**64 - 1]:
        yield f"length-{lie}", lie.to_bytes(8, "little") + SOUND[8:]


def wrong_fields() -> Iterator[tuple[str, bytes]]:
    fields: dict[str, list[object]] = {
        "shape": [
            [],
            [3],
            [4, 4],
            [-3, -4],
            [3.0, 4],
            [True, 12],
            ["3", 4],
            None,
            12,
            "12",
            {},
            [[3, 4]],
            [2**62, 2**62],
            [2**64, 12],
            [10**400],
            [1] * 1000 + [12],
            [2**63 - 1] * 64,
            [2**40, 2**40, 0],
        ],
        "dtype": ["F64", "f32", "", None, 4, ["F32"], "torch.float32", "F4", "\ud800"],
        "data_offsets": [
            [],
            [0],
            [0, 48, 48],
            [48, 0],
            [-48, 0],
            [0, 47],
            [0, 49],
            [1, 49],
            [2**63, 2**63 + 48],
            [2**64, 2**64],
            [0.0, 48.0],
            ["0", "48"],
            None,
            {},
            0,
            [None, None],
        ],
    }
    for field, values in fields.items():
        for number, value in enumerate(values):
            yield f"{field}-{number}", with_field("a.weight", field, value)


def wrong_structure() -> Iterator[tuple[str, bytes]]:
    plain = json.dumps(HEADER).encode()
    values: list[object] = [
        [],
        [HEADER],
        "text",
        None,
        1,
        True,
        {**HEADER, "x": None},
        {**HEADER, "x": []},
        {**HEADER, "x": {}},
        {**HEADER, "x": HEADER["a.weight"]},
        {**HEADER, "__metadata__": None},
        {**HEADER, "__metadata__": []},
        {**HEADER, "__metadata__": {"a": 1}},
        {**HEADER, "__metadata__": {"a": None}},
        {**HEADER, "__metadata__": {"a": {"b": "c"}}},
        {"__metadata__": {}},
        {},
        {name: value for name, value in HEADER.items() if name != "a.bias"},
        {name: value for name, value in HEADER.items() if name != "step"},
        b"{" * HEADER_BYTES,
        b"{" + b"\0" * 64,
        b'{"a":' * 100_000,
        plain[:-1] + b"]",
        plain[:-1] + b",}",
        plain[:-1] + b',"x":NaN}',
        plain[:-1] + b',"x":Infinity}',
        plain[:-1] + b', "step":' + json.dumps(HEADER["step"]).encode() + b"}",
        plain[:-1] + b', "__metadata__":{}}',
        plain[:-1] + b',"\xff\xfe":1}',
        plain.replace(b'"pt"', b'"pt","format":"pt"'),
        plain.replace(b'"shape"', b'"shape":[1],"shape"', 1),
        plain + b"x",
        plain + plain,
        b"\xef\xbb\xbf" + plain,
        plain.decode().encode("utf-16"),
        plain[:-1] + b',"x":' + b"9" * 5000 + b"}",
    ]
    for number, value in enumerate(values):
        yield f"structure-{number}", with_header(value)
    for extra in (b"\0", b"\0" * 8, DATA):
        yield f"extra-{len(extra)}", SOUND + extra


def overlapping() -> Iterator[tuple[str, bytes]]:
    """Every tensor's range moved, widened and put upon every other's; sizes and ranges still agree."""
    tensors = {name: entry for name, entry in HEADER.items() if name not in {"__metadata__", "void"}}
    for name, entry in tensors.items():
        begin, end = entry["data_offsets"]
        for shift in (-24, -8, -4, -1, 1, 4, 8, 24, 2**20, 2**40):
            yield f"moved-{name}-{shift}", with_field(name, "data_offsets", [begin + shift, end + shift])
            grown = {
                **entry,
                "dtype": "U8",
                "shape": [end + shift - begin],
                "data_offsets": [begin, end + shift],
            }
            yield f"grown-{name}-{shift}", with_header({**HEADER, name: grown})
        for other, place in tensors.items():
            if other != name:
                yield (
                    f"upon-{name}-{other}",
                    with_header({**HEADER, "x": {**place, "data_offsets": [begin, end]}}),
                )


def flipped(count: int = 450) -> Iterator[tuple[str, bytes]]:
    random_source = random.Random(0)
    for number in range(count):
        content = bytearray(SOUND)
        for _ in range(random_source.choice((1, 1, 2, 8))):
            content[random_source.randrange(8 + HEADER_BYTES)] ^= 1 << random_source.randrange(8)
        yield f"flip-{number}", bytes(content)


def spliced(count: int = 450) -> Iterator[tuple[str, bytes]]:
    """Pieces cut out, doubled, put elsewhere, or replaced by random bytes, all over the file."""
    random_source = random.Random(1)
    for number in range(count):
        content = bytearray(SOUND)
        for _ in range(random_source.choice((1, 1, 2))):
            begin = random_source.randrange(len(content))
            end = begin + random_source.choice((1, 2, 8, 40))
            piece = content[begin:end]
            action = random_source.randrange(4)
            if action == 0:
                del content[begin:end]
            elif action == 1:
                content[begin:begin] = piece
            elif action == 2:
                at = random_source.randrange(len(content))
                content[at : at + len(piece)] = piece
            else:
                content[begin:end] = random_source.randbytes(len(piece))
        yield f"splice-{number}", bytes(content)


FAULTY = dict([*truncated(), *lying_lengths(), *wrong_fields(), *wrong_structure(), *overlapping()])
FUZZED = dict([*flipped(), *spliced()])


def read_all(content: bytes, folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "damaged.safetensors"
    path.write_bytes(content)
    with open_checkpoint(path) as checkpoint:
        return {key: checkpoint.tensor(key) for key in checkpoint}


def test_there_are_more_than_a_thousand() -> None:
    assert len(FAULTY) + len(FUZZED) > 1000
    assert len({*FAULTY.values(), *FUZZED.values()}) > 1000


@pytest.mark.parametrize("content", FAULTY.values(), ids=FAULTY)
def test_a_damaged_file_gives_a_checkpoint_error_with_its_name(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"damaged\.safetensors: ") as caught:
        read_all(content, tmp_path)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["flip", "splice"])
def test_fuzzed_files_are_refused_where_the_safetensors_library_refuses_them(
    kind: str, tmp_path: Path, same_bytes: Callable[[torch.Tensor, torch.Tensor], bool]
) -> None:
    refused = 0
    for name, content in FUZZED.items():
        if not name.startswith(kind):
            continue
        theirs, ours = read_with_library(content), refused_or_read(content, tmp_path)
        refused += theirs is None
        assert (ours is None) == (theirs is None), name
        if ours is not None and theirs is not None:
            assert ours.keys() == theirs.keys(), name
            assert all(same_bytes(ours[key], theirs[key]) for key in ours), name
    assert refused > 200


def refused_or_read(content: bytes, folder: Path) -> dict[str, torch.Tensor] | None:
    try:
        return read_all(content, folder)
    except CheckpointError as error:
        return None if error.hint and "\n" not in str(error) else {}


def read_with_library(content: bytes) -> dict[str, torch.Tensor] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            theirs: dict[str, torch.Tensor] = load(content)
        except (SafetensorError, KeyError, RuntimeError, ValueError, OverflowError):
            return None
    return theirs


IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path

import torch

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import CheckpointError

def outcome(path):
    try:
        with open_checkpoint(path) as checkpoint:
            for key in checkpoint:
                checkpoint.tensor(key)
    except CheckpointError:
        return "refused"
    return "read"

files = sorted(Path(sys.argv[1]).iterdir())
outcome(files[0])  # whatever is loaded at the first use
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 16 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
counts = {"refused": 0, "read": 0}
for file in files:
    counts[outcome(file)] += 1
print(counts["refused"], counts["read"])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited as Linux does")
def test_no_damaged_file_makes_a_process_take_more_memory_than_files_of_that_size_need(
    tmp_path: Path,
) -> None:
    for number, content in enumerate([*FAULTY.values(), *FUZZED.values()]):
        (tmp_path / f"{number}.safetensors").write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", IN_LITTLE_MEMORY, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    refused, read = map(int, done.stdout.split())
    assert refused + read == len(FAULTY) + len(FUZZED)
    assert refused >= len(FAULTY)
