"""Files made to exhaust memory or time, and how a user meets each.

A builder takes a folder and gives the path of the bomb in it; files are small, or sparse on the disk. `python -m
tests.chaos.bombs_made FOLDER [KIND ...]` opens each in a process of its own whose memory is bounded, and prints what
became of it as JSON lines. `measured` does so from a test.
"""

import contextlib
import gzip
import io
import json
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOM_BYTES = 500 << 20
"""What a child may take beyond what it holds with all modules loaded."""
MOST_SECONDS = 60
"""After which a child is ended."""

Builder = Callable[[Path], Path]
Opener = Callable[[Path], object]


class Bomb(NamedTuple):
    """A kind of bomb: its name, what makes it, and the public function that a user opens it with."""

    kind: str
    build: Builder
    open: Opener


# Tars, as shards to train on.


def tar_sparse(folder: Path) -> Path:
    """One GNU sparse member of 100 GiB, of which the file holds 512 bytes."""
    info = tarfile.TarInfo("a.source.png")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 512
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"%011o\0%011o\0" % (0, 512)
    header[483:495] = b"\x80" + (100 << 30).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return _written(folder / "sparse.tar", bytes(header) + bytes(1536))


def tar_declared(folder: Path) -> Path:
    """A picture that declares 300 MB; the file is that large, and sparse on the disk."""
    info = tarfile.TarInfo("a.source.png")
    info.size = 300 << 20
    return _sparse(folder / "declared.tar", info.tobuf(tarfile.GNU_FORMAT), info.size + 2048)


def tar_sized(folder: Path) -> Path:
    """A name of 2 GiB before a member, in a file of that size."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2 << 30
    return _sparse(folder / "sized.tar", info.tobuf(tarfile.GNU_FORMAT), info.size + 2048)


def tar_nested(folder: Path) -> Path:
    """A gzip of 200 kB that unpacks to a member of 200 MB."""
    path = folder / "nested.tar.gz"
    info = tarfile.TarInfo("a.source.png")
    info.size = 200 << 20
    with gzip.open(path, "wb", compresslevel=1) as stream:
        stream.write(info.tobuf(tarfile.GNU_FORMAT))
        for _ in range(200):
            stream.write(bytes(1 << 20))
        stream.write(bytes(1024))
    return path


# PyTorch's zips and pickles.


def torch_compressed(folder: Path) -> Path:
    """A `data.pkl` of 400 MB in 400 kB, deflated."""
    path = folder / "compressed.pt"
    archive = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with archive, archive.open("archive/data.pkl", "w") as member:
        for _ in range(400):
            member.write(bytes(1 << 20))
    return path


def torch_large_pickle(folder: Path) -> Path:
    """A `data.pkl` of 2 GiB, stored; the file is sparse on the disk."""
    return _stored_zip(folder / "large.pt", [("archive/data.pkl", 2 << 30)])


def torch_large_record(folder: Path) -> Path:
    """A `byteorder` of 1 GiB beside a sound pickle."""
    data = pickle.dumps({}, protocol=2)
    members: list[tuple[str, bytes | int]] = [("archive/data.pkl", data), ("archive/byteorder", 1 << 30)]
    return _stored_zip(folder / "record.pt", [*members, ("archive/version", b"3\n")])


def torch_overlapping(folder: Path) -> Path:
    """Two thousand pickles that are all the same 8 MB of the file."""
    name, size = b"archive/data.pkl", 8 << 20
    local = _local_header(name, size)
    central = b"".join(_central_entry(b"archive/%06d.pkl" % number, size, 0) for number in range(2000))
    central = _central_entry(name, size, 0) + central
    body = local + b"cos\nsystem\n." + bytes(size - 12)
    return _written(folder / "overlapping.pt", body + central + _end_of_zip(2001, len(central), len(body)))


def torch_many_members(folder: Path) -> Path:
    """A million members of no bytes, in a list of 60 MB."""
    data = pickle.dumps({}, protocol=2)
    first = _local_header(b"archive/data.pkl", len(data)) + data
    empty = _local_header(b"archive/data/0", 0)
    central = _central_entry(b"archive/data.pkl", len(data), 0)
    central += _central_entry(b"archive/data/0", 0, len(first)) * 1_000_000
    body = first + empty
    return _written(folder / "members.pt", body + central + _end_of_zip(1_000_001, len(central), len(body)))


def torch_declared_storage(folder: Path) -> Path:
    """A tensor of a storage that declares 2⁴⁰ numbers."""
    return _torch_file(folder / "storage.pt", _one_tensor(1 << 40, 1 << 40))


def torch_expanded(folder: Path) -> Path:
    """A tensor of 2³³ numbers that are all the same one, turned into another type while it is unpickled."""
    moved = _called(
        "torch._utils", "_rebuild_device_tensor_from_cpu_tensor",
        _tensor(4, (1 << 33,), (0,)), b"ctorch\nfloat64\n", _text("cpu"), pickle.NEWFALSE,
    )  # fmt: skip
    return _torch_file(folder / "expanded.pt", _dictionary(moved))


def torch_bytearray(folder: Path) -> Path:
    """`bytearray(300_000_000)`, which no payload stands behind."""
    made = _called("builtins", "bytearray", b"J" + struct.pack("<i", 300_000_000))
    return _torch_file(folder / "bytearray.pt", _dictionary(made, made, made))


def torch_repeated_text(folder: Path) -> Path:
    """A text of 1 MB, encoded two thousand times by five bytes each."""
    pieces = [b"\x80\x02c_codecs\nencode\nq\x000", _text("x" * (1 << 20)), _text("latin1")]
    pieces += [b"\x86q\x010](", b"h\x00h\x01R" * 2000, b"e."]
    return _torch_file(folder / "repeated.pt", b"".join(pieces))


def torch_storage_made(folder: Path) -> Path:
    """`torch.storage.UntypedStorage(2**34)`, called from the pickle."""
    made = _called("torch.storage", "UntypedStorage", b"\x8a\x05" + (1 << 34).to_bytes(5, "little"))
    return _torch_file(folder / "made.pt", _dictionary(made))


def torch_wide_key(folder: Path) -> Path:
    """A key of nested pairs, each of the one before twice: 2⁶⁰ values to hash, in 300 bytes."""
    key = b"K\x01" + b"q\x00h\x00\x86" * 60
    return _torch_file(folder / "key.pt", b"\x80\x02}(" + key + b"K\x01u.")


def torch_deep_key(folder: Path) -> Path:
    """A key of a million nested tuples, which hashing follows to the end of the C stack."""
    return _torch_file(folder / "deep.pt", b"\x80\x02}(K\x01" + b"\x85" * 1_000_000 + b"K\x01u.")


def torch_wide_error(folder: Path) -> Path:
    """Nested pairs in a function's place, which an error message would write out: 2⁶⁰ numbers."""
    return _torch_file(folder / "error.pt", b"\x80\x02K\x01" + b"q\x00h\x00\x86" * 60 + b")R.")


def torch_many_objects(folder: Path) -> Path:
    """Twenty million empty dictionaries, a byte each."""
    return _torch_file(folder / "objects.pt", b"\x80\x02](" + b"}" * 20_000_000 + b"e.")


def torch_cyclic(folder: Path) -> Path:
    """A list that holds itself, as the state dict."""
    return _torch_file(folder / "cyclic.pt", b"\x80\x02]q\x00h\x00a.")


def torch_legacy_storage(folder: Path) -> Path:
    """The format before PyTorch 1.6: a storage that declares 2³⁶ numbers, made before a byte of it is read."""
    head = b"".join(
        pickle.dumps(value, protocol=2)
        for value in (
            0x1950A86A20F9469CFC6C,
            1001,
            {
                "protocol_version": 1001,
                "little_endian": True,
                "type_sizes": {"short": 2, "int": 4, "long": 4},
            },
        )
    )
    return _written(
        folder / "legacy.pt", head + _one_tensor(1 << 36, 4, legacy=True) + pickle.dumps(["0"], protocol=2)
    )


def torch_legacy_text(folder: Path) -> Path:
    """The older format: a text that declares 4 GB in a file of some bytes."""
    head = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + pickle.dumps(1001, protocol=2)
    return _written(folder / "text.pt", head + b"\x80\x02X\xff\xff\xff\xffabc.")


# Pictures.


def png_pixels(folder: Path) -> Path:
    """A PNG of 60,000 × 60,000 black pixels in a few bytes of header; its data are cut short."""
    return _written(folder / "pixels.png", _png(60_000, 60_000, zlib.compress(bytes(1 << 20))))


def png_warned(folder: Path) -> Path:
    """A PNG of 120 megapixels: between Pillow's warning and its error."""
    return _written(folder / "warned.png", _png(12_000, 10_000, zlib.compress(bytes(1 << 20))))


def png_text(folder: Path) -> Path:
    """A PNG whose zTXt unpacks to 300 MB."""
    packed = b"Comment\0\0" + _zeros_deflated(300)
    return _written(folder / "text.png", _png(8, 8, zlib.compress(bytes(8 * 25)), [(b"zTXt", packed)]))


def png_profile(folder: Path) -> Path:
    """A PNG whose colour profile unpacks to 300 MB."""
    packed = b"icc\0\0" + _zeros_deflated(300)
    return _written(folder / "profile.png", _png(8, 8, zlib.compress(bytes(8 * 25)), [(b"iCCP", packed)]))


def gif_pixels(folder: Path) -> Path:
    """A GIF of 65,535 × 65,535 with one small frame."""
    head = b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\x80\0\0" + bytes(6)
    frame = b"\x2c" + struct.pack("<HHHH", 0, 0, 65535, 65535) + b"\0\x02\x02\x4c\x01\0"
    return _written(folder / "pixels.gif", head + frame + b";")


def gif_frames(folder: Path) -> Path:
    """A GIF of 20,000 × 4,000 and 5,000 frames, of which only the first may be decoded; it is cut short."""
    head = b"GIF89a" + struct.pack("<HH", 30000, 4000) + b"\x80\0\0" + bytes(6)
    frame = b"\x2c" + struct.pack("<HHHH", 0, 0, 1, 1) + b"\0\x02\x02\x4c\x01\0"
    return _written(folder / "frames.gif", head + frame * 5000)


def webp_pixels(folder: Path) -> Path:
    """An animated WebP with a canvas of 16,384 × 16,384, which its decoder allocates when it is opened."""
    side = (16383).to_bytes(3, "little")
    canvas = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + side + side
    still = b"VP8L" + struct.pack("<I", 6) + b"\x2f\xff\xff\xff\x0f\0"
    frame = b"ANMF" + struct.pack("<I", 16 + len(still)) + bytes(6) + side + side + bytes(4) + still
    body = b"WEBP" + canvas + b"ANIM" + struct.pack("<I", 6) + bytes(6) + frame
    return _written(folder / "pixels.webp", b"RIFF" + struct.pack("<I", len(body)) + body)


def tiff_tile(folder: Path) -> Path:
    """A TIFF of 64 × 64 in one tile of 60,000 × 60,000."""
    tags = [(256, 64), (257, 64), (258, 8), (259, 8), (262, 1), (277, 1), (322, 60_000), (323, 60_000)]
    tags += [(324, 8), (325, 16)]
    directory = struct.pack("<H", len(tags))
    for tag, value in tags:
        directory += struct.pack("<HHII", tag, 4, 1, value)
    body = b"II*\0" + struct.pack("<I", 24) + zlib.compress(bytes(64))[:16].ljust(16, b"\0")
    return _written(folder / "tile.tif", body + directory + bytes(4))


# JSON, YAML and the headers of weights.


def run_nested(folder: Path) -> Path:
    """A run of 100,000 nested lists."""
    return _written(folder / "nested.json", b'{"schema": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def run_wide(folder: Path) -> Path:
    """A run of 120 MB that is empty lists."""
    return _written(folder / "wide.json", b'{"stages":[' + b"[]," * 40_000_000 + b"[]]}")


def run_giant(folder: Path) -> Path:
    """A run of 8 GiB, sparse on the disk."""
    return _sparse(folder / "giant.json", b'{"schema": 1', 8 << 30)


def run_integer(folder: Path) -> Path:
    """A run whose duration has ten million digits."""
    return _written(folder / "integer.json", b'{"seconds": ' + b"9" * 10_000_000 + b"}")


def yaml_aliases(folder: Path) -> Path:
    """Nine levels of ten aliases each: a billion texts ("billion laughs")."""
    levels = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    return _written(folder / "aliases.yaml", "\n".join([*levels, "source_key: *a9"]).encode())


def yaml_merges(folder: Path) -> Path:
    """Merged mappings that repeat each other ten times a level."""
    levels = ["a0: &a0 {x: 1}"]
    levels += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 10)]
    return _written(folder / "merges.yaml", "\n".join(levels).encode())


def yaml_nested(folder: Path) -> Path:
    """Ten thousand nested lists."""
    return _written(folder / "nested.yaml", b"source_key: " + b"[" * 10_000 + b"]" * 10_000)


def yaml_integer(folder: Path) -> Path:
    """An integer to the base of 60, of 300,000 places."""
    return _written(folder / "integer.yaml", b"seed: 1" + b":1" * 300_000)


def yaml_giant(folder: Path) -> Path:
    """A configuration of 4 GiB, sparse on the disk."""
    return _sparse(folder / "giant.yaml", b"source_key: a\n", 4 << 30)


def header_wide(folder: Path) -> Path:
    """A safetensors header of 90 MB: a million tensors of no bytes."""
    entry = '"{}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    return _safetensors(
        folder / "wide.safetensors", "{" + ",".join(map(entry.format, range(1_000_000))) + "}"
    )


def header_lists(folder: Path) -> Path:
    """A safetensors header of 60 MB that is empty lists."""
    return _safetensors(folder / "lists.safetensors", '{"a":[' + "[]," * 20_000_000 + "[]]}")


def header_nested(folder: Path) -> Path:
    """A safetensors header of 100,000 nested lists."""
    return _safetensors(folder / "nested.safetensors", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}")


def header_declared(folder: Path) -> Path:
    """A safetensors header that declares a tensor of 2⁶⁰ bytes, and none of them."""
    entry = {"dtype": "U8", "shape": [1 << 60], "data_offsets": [0, 1 << 60]}
    return _safetensors(folder / "declared.safetensors", json.dumps({"a": entry}))


def dump_quoted(folder: Path) -> Path:
    """A dump whose header quotes a JSON text of 60 MB of empty lists."""
    texts = {"sigmascope_dump": "1", "metadata": "[" + "[]," * 20_000_000 + "[]]"}
    entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    header = json.dumps({"__metadata__": texts, "a": entry}, separators=(",", ":"))
    return _safetensors(folder / "quoted.safetensors", header, b"x")


def dump_index(folder: Path) -> Path:
    """A folder of dumps with an index of 2 GiB, sparse on the disk."""
    place = folder / "dumps"
    place.mkdir()
    _sparse(place / "index.jsonl", b'{"name": "a"}\n', 2 << 30)
    entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    _safetensors(place / "a.safetensors", json.dumps({"a": entry}), b"x")
    return place


def gguf_declared(folder: Path) -> Path:
    """A GGUF header that declares 2⁶⁰ tensors and fields."""
    return _written(folder / "declared.gguf", b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + bytes(64))


def gguf_array(folder: Path) -> Path:
    """A GGUF field of 100 million numbers, a byte each in the file and 36 as Python's integers."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    return _written(
        folder / "array.gguf", head + struct.pack("<IIQ", 9, 1, 100_000_000) + b"\x80" * 100_000_000
    )


def gguf_texts(folder: Path) -> Path:
    """A GGUF field of 12 million empty texts."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    return _written(folder / "texts.gguf", head + struct.pack("<IIQ", 9, 8, 12_000_000) + bytes(96_000_000))


# LoRA files whose small tensors declare large ones.


def lora_loha(folder: Path) -> Path:
    """A LoHa of rank 1 in 1 MB that changes a weight (131,072, 131,072)."""
    side = 1 << 17
    shapes = {"hada_w1_a": (side, 1), "hada_w1_b": (1, side), "hada_w2_a": (side, 1), "hada_w2_b": (1, side)}
    return _lora(folder / "loha.safetensors", shapes)


def lora_cores(folder: Path) -> Path:
    """A LoHa of rank 1 in 1 MB with a kernel of 10,000 places, each (131,072, 131,072)."""
    side = 1 << 17
    shapes = {"hada_w1_a": (1, side), "hada_w1_b": (1, side), "hada_w2_a": (1, side), "hada_w2_b": (1, side)}
    return _lora(
        folder / "cores.safetensors", shapes | {"hada_t1": (1, 1, 100, 100), "hada_t2": (1, 1, 100, 100)}
    )


def lora_odd_cores(folder: Path) -> Path:
    """A LoHa in 4 MB whose cores are a row and a column: in the wrong order, 1 GiB lies between them."""
    side, rank = 1 << 11, 512
    shapes = {
        "hada_w1_a": (1, side),
        "hada_t1": (1, rank, 1, 1),
        "hada_w1_b": (rank, side),
        "hada_w2_a": (rank, side),
        "hada_t2": (rank, 1, 1, 1),
        "hada_w2_b": (1, side),
    }
    return _lora(folder / "odd.safetensors", shapes)


def lora_lokr(folder: Path) -> Path:
    """A LoKr in 1 MB that changes a weight (262,144, 262,144)."""
    return _lora(folder / "lokr.safetensors", {"lokr_w1": (512, 512), "lokr_w2": (512, 512)})


def lora_tucker(folder: Path) -> Path:
    """A convolution of three factors whose first product alone takes 100 GB."""
    shapes = {
        "lora_down.weight": (1, 1 << 17, 1, 1),
        "lora_mid.weight": (1 << 17, 1, 1, 1),
        "lora_up.weight": (1, 1 << 17, 1, 1),
    }
    return _lora(folder / "tucker.safetensors", shapes)


def lora_rank(folder: Path) -> Path:
    """A plain LoRA of rank 262,144 for a weight of (1, 1): its Gram matrices would take 550 GB."""
    shapes = {"lora_down.weight": (1 << 18, 1), "lora_up.weight": (1, 1 << 18)}
    return _lora(folder / "rank.safetensors", shapes)


def lora_plain(folder: Path) -> Path:
    """A plain LoRA of rank 1 in 1 MB that changes a weight (262,144, 262,144)."""
    shapes = {"lora_down.weight": (1, 1 << 18), "lora_up.weight": (1 << 18, 1)}
    return _lora(folder / "plain.safetensors", shapes)


# How a user meets them.


def read_weights(path: Path) -> int:
    """Every tensor of a file of weights."""
    from sigmascope.checkpoints import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        return sum(checkpoint.tensor(name).numel() for name in checkpoint)


def read_samples(path: Path) -> int:
    """Every sample of a shard; a fault in it is raised."""
    from sigmascope.errors import DataError
    from sigmascope.lbm.shards import read_shard

    samples = list(read_shard(str(path), ["source"]))
    for sample in samples:
        if sample.fault is not None:
            raise DataError(sample.fault)
    return len(samples)


def read_picture(path: Path) -> tuple[int, int]:
    """A picture as `lbm infer` opens it, then as a sample of a shard."""
    from sigmascope.errors import FileError
    from sigmascope.lbm.images import load_image
    from sigmascope.lbm.samples import decode_picture

    with contextlib.suppress(FileError):
        load_image(path)
    return decode_picture(path.read_bytes()).size


def read_file_picture(path: Path) -> tuple[int, int]:
    """A picture as `lbm infer` opens it."""
    from sigmascope.lbm.images import load_image

    return load_image(path).size


def read_run(path: Path) -> object:
    """A saved run."""
    from sigmascope import load_run

    return load_run(path)


def read_config(path: Path) -> object:
    """The YAML of a training."""
    from sigmascope.lbm.training.settings import load_train_settings

    return load_train_settings(path)


def read_dump(path: Path) -> object:
    """A dump with its metadata."""
    from sigmascope import load_tensors

    return load_tensors(path)


def read_dumps(path: Path) -> int:
    """The index of a folder of dumps."""
    from sigmascope import TensorDumps

    return len(TensorDumps(path))


def inspect(path: Path) -> object:
    """The strengths of a LoRA's modules."""
    from sigmascope.lora.inspect import inspect_lora

    return inspect_lora(path)


def resize(path: Path) -> object:
    """A LoRA cut to rank 1."""
    from sigmascope.lora.ranks import FixedRank, RankRules
    from sigmascope.lora.resize import RankPlan, resize_lora

    return resize_lora(path, path.with_name("out.safetensors"), RankPlan(RankRules(FixedRank(1, 1))))


def compare(path: Path) -> object:
    """A LoRA compared with itself."""
    from sigmascope.lora.compare import compare_loras

    return compare_loras(path, path)


def validate(path: Path) -> object:
    """A LoRA of a small layer, held against its fine-tuned model."""
    from sigmascope.lora.validate import validate_lora

    return validate_lora(_model(path, "base", 0.0), _model(path, "tuned", 1.0), path)


def bake(path: Path) -> object:
    """A LoRA merged into the file of a small model."""
    from sigmascope.lora.checkpoint_merge import merge_into_checkpoint

    return merge_into_checkpoint([path], _model(path, "base", 0.0), path.with_name("out.safetensors"))


def merge(path: Path) -> object:
    """A LoRA merged into a live model."""
    from torch import nn

    from sigmascope.lora.live_merge import merge_into_model
    from sigmascope.lora.reader import open_lora

    model = nn.Module()
    place: nn.Module = model
    for name in _LAYER.split(".")[:-1]:
        place.add_module(name, nn.Module())
        place = place.get_submodule(name)
    place.add_module(_LAYER.rpartition(".")[2], nn.Linear(4, 4))
    with open_lora(path) as lora:
        return merge_into_model(model, lora)


BOMBS: Sequence[Bomb] = (
    *(
        Bomb(build.__name__, build, read_samples)
        for build in (tar_sparse, tar_declared, tar_sized, tar_nested)
    ),
    *(
        Bomb(build.__name__, build, read_weights)
        for build in (
            torch_compressed,
            torch_large_pickle,
            torch_large_record,
            torch_overlapping,
            torch_many_members,
            torch_declared_storage,
            torch_expanded,
            torch_bytearray,
            torch_repeated_text,
            torch_storage_made,
            torch_wide_key,
            torch_deep_key,
            torch_wide_error,
            torch_many_objects,
            torch_cyclic,
            torch_legacy_storage,
            torch_legacy_text,
            header_wide,
            header_lists,
            header_nested,
            header_declared,
            gguf_declared,
            gguf_array,
            gguf_texts,
        )
    ),
    *(
        Bomb(build.__name__, build, read_picture)
        for build in (
            png_pixels,
            png_warned,
            png_text,
            png_profile,
            gif_pixels,
            gif_frames,
            webp_pixels,
            tiff_tile,
        )
    ),
    *(Bomb(build.__name__, build, read_run) for build in (run_nested, run_wide, run_giant, run_integer)),
    *(
        Bomb(build.__name__, build, read_config)
        for build in (yaml_aliases, yaml_merges, yaml_nested, yaml_integer, yaml_giant)
    ),
    Bomb("dump_quoted", dump_quoted, read_dump),
    Bomb("dump_index", dump_index, read_dumps),
    *(
        Bomb(f"{build.__name__}_{opener.__name__}", build, opener)
        for opener in (inspect, resize, compare, validate, bake, merge)
        for build in (lora_loha, lora_cores, lora_odd_cores, lora_lokr, lora_tucker, lora_rank, lora_plain)
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a bomb.

    Attributes:
        kind: Of the bomb.
        seconds: Of the processor, from the call to its end; what other processes take does not count.
        peak_bytes: Memory that the process held at most beyond what it held before.
        error: The type of what was raised; None where the file was read; a signal's number where the process died.
        message: Of the error, its first 400 characters.
        characters: Of the whole message.
        ours: Whether the error is one that Sigmascope raises on purpose.
        warned: What was warned of.
        left: Files of a result that was not finished.
    """

    kind: str
    seconds: float
    peak_bytes: int
    error: str | None = None
    message: str = ""
    characters: int = 0
    ours: bool = False
    warned: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def measured(folder: Path, kinds: Iterable[str] = ()) -> dict[str, Outcome]:
    """Open bombs, each in a process of its own with `ROOM_BYTES` of memory, and tell what became of them.

    Args:
        folder: For the files.
        kinds: Some of the kinds; all by default.
    """
    command = [sys.executable, "-m", "tests.chaos.bombs_made", str(folder), *kinds]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"kind"')]
    told = ({**line, "warned": tuple(line["warned"]), "left": tuple(line["left"])} for line in lines)
    return {line["kind"]: Outcome(**line) for line in told}


def main(folder: Path, kinds: Sequence[str]) -> None:
    """Load everything once, then open each bomb in a fork."""
    import sigmascope.checkpoints
    import sigmascope.lbm.data
    import sigmascope.lbm.training.settings
    import sigmascope.lora.apply
    import sigmascope.lora.checkpoint_merge
    import sigmascope.lora.compare
    import sigmascope.lora.inspect
    import sigmascope.lora.live_merge
    import sigmascope.lora.resize
    import sigmascope.lora.validate  # noqa: F401 - loaded before memory is bounded

    with contextlib.suppress(ImportError):
        import gguf  # noqa: F401
    for bomb in BOMBS:
        if not kinds or bomb.kind in kinds:
            place = folder / bomb.kind
            place.mkdir(parents=True)
            sys.stdout.write(json.dumps(asdict(_in_fork(bomb, bomb.build(place)))) + "\n")
            sys.stdout.flush()


def _in_fork(bomb: Bomb, path: Path) -> Outcome:
    reading, writing = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(MOST_SECONDS)
        outcome = _opened(bomb, path)
        os.write(writing, json.dumps(asdict(outcome)).encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        told = stream.read()
    _, status = os.waitpid(child, 0)
    if not told:
        return Outcome(bomb.kind, time.monotonic() - began, 0, f"signal {status & 0x7F}")
    return Outcome(**json.loads(told))


def _opened(bomb: Bomb, path: Path) -> Outcome:
    import warnings

    from sigmascope.errors import SigmascopeError

    before, held = _kilobytes("VmSize") << 10, _kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    resource.setrlimit(resource.RLIMIT_AS, (before + ROOM_BYTES, resource.RLIM_INFINITY))
    error: BaseException | None = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        began = time.process_time()
        try:
            bomb.open(path)
        except BaseException as raised:  # noqa: BLE001 - a MemoryError is what is looked for
            error = raised
        seconds = time.process_time() - began
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    peak = max(0, _kilobytes("VmHWM") - held) << 10
    message = "" if error is None else str(error)
    return Outcome(
        bomb.kind,
        seconds,
        peak,
        None if error is None else type(error).__name__,
        message[:400],
        len(message),
        isinstance(error, SigmascopeError),
        tuple(str(each.message)[:200] for each in warned),
        () if error is None else tuple(str(file) for file in path.parent.rglob("out*")),
    )


def _kilobytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0])


# What builders and openers share.

_LAYER = "down_blocks.0.attentions.0.proj_in"


def _model(beside: Path, name: str, value: float) -> Path:
    """A model of one layer (4, 4)."""
    import torch
    from safetensors.torch import save_file

    path = beside.with_name(f"{name}.safetensors")
    save_file({f"{_LAYER}.weight": torch.full((4, 4), value), "conv_in.weight": torch.ones(4, 4, 3, 3)}, path)
    return path


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _sparse(path: Path, head: bytes, size: int) -> Path:
    with path.open("wb") as stream:
        stream.write(head)
        stream.truncate(size)
    return path


def _zeros_deflated(megabytes: int) -> bytes:
    packer = zlib.compressobj(9)
    return b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(megabytes)), packer.flush()])


def _local_header(name: bytes, size: int) -> bytes:
    return struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 33, 0, size, size, len(name), 0) + name


def _central_entry(name: bytes, size: int, offset: int) -> bytes:
    fixed = (b"PK\1\2", 20, 20, 0, 0, 0, 33, 0, size, size, len(name), 0, 0, 0, 0, 0, offset)
    return struct.pack("<4s6H3I5H2I", *fixed) + name


def _end_of_zip(entries: int, size: int, offset: int) -> bytes:
    """The zip64 end, its locator, and the end as of old."""
    record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, entries, entries, size, offset)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, offset + size, 1)
    return (
        record + locator + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 65535, 65535, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    )


def _stored_zip(path: Path, members: Sequence[tuple[str, bytes | int]]) -> Path:
    """A zip of members that are bytes, or as many zeros as a number says, which take no room on the disk."""
    central = b""
    with path.open("wb") as stream:
        for name, data in members:
            size = data if isinstance(data, int) else len(data)
            central += _central_entry(name.encode(), size, stream.tell())
            stream.write(_local_header(name.encode(), size))
            if isinstance(data, int):
                stream.seek(data, io.SEEK_CUR)
            else:
                stream.write(data)
        offset = stream.tell()
        stream.write(central + _end_of_zip(len(members), len(central), offset))
    return path


def _torch_file(path: Path, pickled: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", bytes(16))
        archive.writestr("archive/version", b"3\n")
    return path


def _text(text: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(text)) + text.encode()


def _long(number: int) -> bytes:
    data = number.to_bytes(number.bit_length() // 8 + 1, "little")
    return pickle.LONG1 + bytes([len(data)]) + data


def _called(module: str, name: str, *arguments: bytes) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def _tensor(numbers: int, shape: Sequence[int], strides: Sequence[int], legacy: bool = False) -> bytes:
    """A float32 tensor over the storage `0`, which declares so many numbers."""
    storage = [_text("storage"), b"ctorch\nFloatStorage\n", _text("0"), _text("cpu"), _long(numbers)]
    pid = b"(" + b"".join([*storage, pickle.NONE] if legacy else storage) + b"tQ"
    sizes, steps = (b"(" + b"".join(map(_long, values)) + b"t" for values in (shape, strides))
    hooks = _called("collections", "OrderedDict")
    return _called("torch._utils", "_rebuild_tensor_v2", pid, _long(0), sizes, steps, pickle.NEWFALSE, hooks)


def _dictionary(*values: bytes) -> bytes:
    items = b"".join(_text(f"w{number}") + value for number, value in enumerate(values))
    return b"\x80\x02}(" + items + b"u."


def _one_tensor(numbers: int, elements: int, *, legacy: bool = False) -> bytes:
    return _dictionary(_tensor(numbers, (elements,), (1,), legacy))


def _png(width: int, height: int, data: bytes, chunks: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in parts
    )


def _safetensors(path: Path, header: str, data: bytes = b"") -> Path:
    encoded = header.encode()
    return _written(path, len(encoded).to_bytes(8, "little") + encoded + data)


def _lora(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """Half-precision tensors of one layer, filled with 2⁻⁷."""
    import torch
    from safetensors.torch import save_file

    layer = f"lora_unet_{_LAYER.replace('.', '_')}"
    tensors: dict[str, Any] = {
        f"{layer}.{end}": torch.full(shape, 2.0**-7, dtype=torch.float16) for end, shape in shapes.items()
    }
    save_file(tensors, path)
    return path


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
