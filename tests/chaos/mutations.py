"""Damage to files: blind on bytes, and knowing where each format keeps its sizes, names and types.

Everything is drawn from the `random.Random` that is given, so a try can be had again. A pickle may be given a payload: a
call that makes the file `marker`, which shows that somebody ran it.
"""

import base64
import io
import json
import pickle
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, Final

Random = random.Random

_EDGES: Final = (
    0,
    1,
    -1,
    2**15,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
_NAMES: Final = (
    "",
    "a",
    "é" * 40,
    "x" * 5000,
    "../../outside",
    "/etc/passwd",
    "a\x00b",
    "\x1b[31mred\x1b]0;title\x07",
    "a\nb\rc",
    "\u202eflipped",
    "__proto__",
    "[bold]markup[/bold]",
    "\udcff",
)


def mutated(name: str, data: bytes, rng: Random, *, other: bytes, marker: str) -> tuple[bytes, str]:
    """Give a file's bytes with damage, and say which.

    Args:
        name: The file's; its suffix chooses what is known of the format.
        data: Its bytes.
        rng: Decides all.
        other: Another file's bytes, to splice.
        marker: The file that a payload makes when it is run.
    """
    knowing = _KNOWING.get(name.rpartition(".")[2])
    if knowing is not None and rng.random() < 0.6:
        chosen = rng.choice(knowing)
        try:
            return chosen(data, rng, marker), chosen.__name__.strip("_")
        except (ValueError, KeyError, IndexError, struct.error, zipfile.BadZipFile, tarfile.TarError):
            pass  # nothing there to change
    how = rng.choice(_BLIND)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        data = how(data, rng, other)
    return data, how.__name__.strip("_")


def _place(data: bytes, rng: Random) -> int:
    """Somewhere; half of the time near an end, where headers and directories are."""
    if not data:
        return 0
    near = rng.random()
    if near < 0.35:
        return rng.randrange(min(len(data), 512))
    if near < 0.5:
        return len(data) - 1 - rng.randrange(min(len(data), 512))
    return rng.randrange(len(data))


def _flip_bits(data: bytes, rng: Random, _other: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if made:
            made[_place(data, rng)] ^= 1 << rng.randrange(8)
    return bytes(made)


def _truncate(data: bytes, rng: Random, _other: bytes) -> bytes:
    return data[: _place(data, rng)]


def _insert(data: bytes, rng: Random, _other: bytes) -> bytes:
    at = _place(data, rng)
    return data[:at] + rng.randbytes(rng.choice((1, 4, 8, 100, 4096))) + data[at:]


def _delete(data: bytes, rng: Random, _other: bytes) -> bytes:
    at = _place(data, rng)
    return data[:at] + data[at + rng.choice((1, 4, 8, 100, 4096)) :]


def _repeat(data: bytes, rng: Random, _other: bytes) -> bytes:
    at, length = _place(data, rng), rng.choice((1, 8, 64, 512, 5000))
    return data[: at + length] + data[at : at + length] * rng.choice((1, 3)) + data[at + length :]


def _blank(data: bytes, rng: Random, _other: bytes) -> bytes:
    at, length = _place(data, rng), rng.choice((1, 8, 512, 1 << 20))
    length = min(length, len(data) - at)
    return data[:at] + rng.choice((b"\0", b"\xff", b" ")) * length + data[at + length :]


def _write_edge(data: bytes, rng: Random, _other: bytes) -> bytes:
    width = rng.choice((2, 4, 8))
    value = (rng.choice(_EDGES) % (1 << 8 * width)).to_bytes(width, rng.choice(("little", "big")))
    at = _place(data, rng)
    return data[:at] + value + data[at + width :]


def _splice(data: bytes, rng: Random, other: bytes) -> bytes:
    at = _place(data, rng)
    return rng.choice((data[:at] + other[_place(other, rng) :], other[: _place(other, rng)] + data[at:]))


def _swap(data: bytes, rng: Random, _other: bytes) -> bytes:
    length = rng.choice((1, 4, 8, 512))
    first, second = sorted((_place(data, rng), _place(data, rng)))
    if first + length > second:
        return data[::-1] if rng.random() < 0.05 else data
    parts = data[second : second + length], data[first + length : second], data[first : first + length]
    return data[:first] + b"".join(parts) + data[second + length :]


_BLIND: Final[tuple[Callable[[bytes, Random, bytes], bytes], ...]] = (
    _flip_bits,
    _flip_bits,
    _truncate,
    _insert,
    _delete,
    _repeat,
    _blank,
    _write_edge,
    _write_edge,
    _splice,
    _swap,
)


# JSON, and safetensors, whose header is JSON.


def _edit_json(data: bytes, rng: Random, _marker: str) -> bytes:
    tree = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        tree = edited(tree, rng)
    return written(tree)


def written(tree: Any) -> bytes:
    """JSON as it is, with a lone surrogate where there is one."""
    return json.dumps(tree, ensure_ascii=True).encode()


def _edit_jsonl(data: bytes, rng: Random, marker: str) -> bytes:
    lines = data.split(b"\n")
    at = rng.choice([number for number, line in enumerate(lines) if line.strip()])
    lines[at] = _edit_json(lines[at], rng, marker)
    return b"\n".join(lines)


def _edit_header(data: bytes, rng: Random, _marker: str) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        header = edited(header, rng)
    text = written(header)
    stated = len(text) if rng.random() < 0.9 else rng.choice(_EDGES) % 2**64
    return struct.pack("<Q", stated) + text + data[8 + length :]


def _resize_tensor(data: bytes, rng: Random, _marker: str) -> bytes:
    """Change sizes and offsets of one tensor so that they still agree, or nearly."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = rng.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    kind = rng.randrange(6)
    if kind == 0:
        entry["shape"] = [rng.choice(_EDGES), *entry["shape"]]
    elif kind == 1:
        entry["shape"] = entry["shape"][::-1]
    elif kind == 2:
        entry["dtype"] = rng.choice(("F32", "F16", "BF16", "I8", "U64", "BOOL", "F8_E4M3", "C64", "F4", "?"))
    elif kind == 3:
        entry["shape"], entry["data_offsets"] = [0], [0, 0]
    elif kind == 4:
        header[rng.choice(_NAMES) or name + "2"] = header.pop(name)
    else:
        entry["data_offsets"] = [rng.choice(_EDGES), rng.choice(_EDGES)]
    text = written(header)
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def _put_numbers(data: bytes, rng: Random, _marker: str) -> bytes:
    """Write NaN, infinity or a huge number among the weights."""
    (length,) = struct.unpack("<Q", data[:8])
    start = 8 + length
    at = start + rng.randrange(max(len(data) - start - 4, 1)) // 4 * 4
    word = rng.choice((0x7FC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00000001, 0x80000000, 0x7C007C00))
    return data[:at] + struct.pack("<I", word) + data[at + 4 :]


def edited(tree: Any, rng: Random) -> Any:
    """A JSON tree with one node changed, gone, doubled, renamed or put elsewhere."""
    places = list(_places(tree))
    if not places:
        return any_json(rng)
    owner, key = rng.choice(places)
    kind = rng.randrange(7)
    if kind <= 2:
        owner[key] = _changed(owner[key], rng)
    elif kind == 3:
        del owner[key]
    elif kind == 4:
        other, place = rng.choice(places)
        owner[key], other[place] = json.loads(json.dumps([other[place], owner[key]]))
    elif isinstance(owner, dict):
        owner[rng.choice((*_NAMES, f"{key}2"))] = owner.pop(key) if kind == 5 else any_json(rng)
    else:
        owner.insert(key, any_json(rng) if kind == 5 else owner[key])
    return tree


def _places(tree: Any) -> Any:
    items: Any = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from _places(value)


def _changed(value: Any, rng: Random) -> Any:
    if isinstance(value, bool) or value is None or rng.random() < 0.3:
        return any_json(rng)
    if isinstance(value, int | float):
        return rng.choice(
            (value + 1, value - 1, -value, value * 1.5, str(value), *_EDGES, 1e308, 5e-324, 1e999)
        )
    if isinstance(value, str) and value:
        at = rng.randrange(len(value))
        return rng.choice((value[:at], value[:at] + chr(rng.randrange(1, 0x500)) + value[at:], *_NAMES))
    return any_json(rng)


def any_json(rng: Random, depth: int = 0) -> Any:
    """A tree that a grammar makes."""
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind < 6:
        numbers = (rng.choice(_EDGES), -rng.choice(_EDGES), 0.5, float("nan"), float("inf"), -0.0, 1e308)
        return rng.choice((None, True, False, rng.choice(numbers), rng.choice(numbers), rng.choice(_NAMES)))
    if kind == 6:
        return [any_json(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {rng.choice(_NAMES): any_json(rng, depth + 1) for _ in range(rng.randrange(4))}
    nested: Any = 1
    for _ in range(rng.choice((5, 50, 400))):
        nested = [nested]
    return nested


# YAML.


def _edit_yaml(data: bytes, rng: Random, _marker: str) -> bytes:
    lines = data.decode().splitlines()
    at = rng.randrange(len(lines))
    key = lines[at].partition(":")[0]
    kind = rng.randrange(6)
    if kind == 0:
        lines[at] = f"{key}: {_yaml_value(rng)}"
    elif kind == 1:
        del lines[at]
    elif kind == 2:
        lines.insert(rng.randrange(len(lines)), lines[at])
    elif kind == 3:
        lines[at] = rng.choice((" ", "\t", "- ", "? ", "<<: ", "&a ", "*a ", "%", "--- ", "#")) + lines[at]
    elif kind == 4:
        lines[at] = f"{rng.choice(_YAML_KEYS)}: {_yaml_value(rng)}"
    else:
        lines += [f"{rng.choice(_YAML_KEYS)}: {_yaml_value(rng)}" for _ in range(rng.randrange(1, 4))]
    return "\n".join(lines).encode(errors="surrogatepass")


def _make_yaml(_data: bytes, rng: Random, _marker: str) -> bytes:
    lines = [f"{rng.choice(_YAML_KEYS)}: {_yaml_value(rng)}" for _ in range(rng.randrange(8))]
    return "\n".join(lines).encode(errors="surrogatepass")


_YAML_KEYS: Final = (
    "a",
    "denoiser",
    "vae",
    "selected_timesteps",
    "prob",
    "learning_rate",
    "train_shards",
    "rank",
    "'\\x1b[1m'",
    "1",
    "null",
    "[1, 2]",
    "{a: b}",
    "!!binary aGk=",
    "<<",
    "~",
)


def _yaml_value(rng: Random, depth: int = 0) -> str:
    kind = rng.randrange(14 if depth < 3 else 10)
    if kind < 3:
        return str(
            rng.choice((*_EDGES, 0.5, "1e-5", ".nan", "-.inf", "0x1F", "0o17", "1_000", "1:30:00", "+"))
        )
    if kind == 3:
        return rng.choice(
            ("true", "no", "~", "null", "''", '"\\x1b[31m"', "2001-02-30", "2001-12-14t21:59:43Z")
        )
    if kind == 4:
        return rng.choice(("&a [*a]", "*gone", "&a 1", "*a", "!!python/object/apply:os.system ['true']"))
    if kind == 5:
        return rng.choice(("!!set {a, b}", "!!omap [a: 1]", "!!int x", "!!float x", "!!timestamp x", "!t x"))
    if kind == 6:
        return rng.choice(
            ("|\n  text\n", ">-\n  text", '"open', "'open", "[1, 2", "{a: 1", "@x", "`x", "\x85")
        )
    if kind < 10:
        return json.dumps(rng.choice(_NAMES))
    inner = [_yaml_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    if kind < 12:
        return f"[{', '.join(inner)}]"
    return "{" + ", ".join(f"k{number}: {value}" for number, value in enumerate(inner)) + "}"


# GGUF.


def _edit_gguf(data: bytes, rng: Random, _marker: str) -> bytes:
    """Write an edge value over the version, a count, or any number of the header."""
    places = (4, 8, 16, *range(24, min(len(data), 700)))
    at = rng.choice(places[:3] if rng.random() < 0.4 else places)
    width = 4 if at == 4 else rng.choice((4, 8))
    value: int = rng.choice((*_EDGES, *range(2, 45))) % (1 << 8 * width)
    return data[:at] + value.to_bytes(width, "little") + data[at + width :]


# Pickles, bare and in torch's archive.


def _edit_archive(data: bytes, rng: Random, marker: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = rng.randrange(len(members))
    name, content = members[at]
    pickled = next(number for number, (one, _) in enumerate(members) if one.endswith("data.pkl"))
    kind = rng.randrange(9)
    if kind <= 3:
        changed = _edit_pickle if kind else _put_payload
        members[pickled] = (members[pickled][0], changed(members[pickled][1], rng, marker))
    elif kind == 4:
        members[at] = (name, _truncate(content, rng, b""))
    elif kind == 5:
        del members[at]
    elif kind == 6:
        members[at] = (rng.choice(_NAMES).encode(errors="replace").decode() or "x", content)
    elif kind == 7:
        members.insert(0, (name, content[::-1]))
    else:
        members[at] = (name, rng.choice((b"big", b"little", b"", b"\xff" * 20)))
    made = io.BytesIO()
    how = rng.choice((zipfile.ZIP_STORED,) * 6 + (zipfile.ZIP_DEFLATED,))
    with zipfile.ZipFile(made, "w", how) as archive:
        for name, content in members:
            archive.writestr(name.replace("\0", "_"), content)
    return made.getvalue()


def _edit_pickle(data: bytes, rng: Random, _marker: str) -> bytes:
    """Change opcodes and their arguments: names of what is asked for, sizes, strides, marks and memo places."""
    swaps = (
        (b"_rebuild_tensor_v2", b"_rebuild_parameter"),
        (b"FloatStorage", rng.choice((b"HalfStorage", b"BoolStorage", b"QInt8Storage", b"Nonsense"))),
        (b"OrderedDict", rng.choice((b"namedtuple", b"Counter", b"deque"))),
        (b"torch._utils\n", b"torch._weird\n"),
        (b"\x85", b"\x86"),
        (b"K\x04", b"J" + struct.pack("<i", rng.choice((-1, 2**31 - 1, 0)))),
        (b"K\x01", b"K\xff"),
        (b"K\x00", b"\x8a\x09" + b"\xff" * 8 + b"\x00"),
        (b"cpu", rng.choice((b"gpu", b"cud", b"met"))),
        (b"X", b"\x8d"),
        (b"q\x00", b"h\x00"),
        (b"(", b""),
        (b"u", b"s"),
    )
    old, new = rng.choice(swaps)
    places = [at for at in range(len(data)) if data.startswith(old, at)]
    at = rng.choice(places)
    return data[:at] + new + data[at + len(old) :]


class _Call:
    """Becomes a call when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def _put_payload(data: bytes, rng: Random, marker: str) -> bytes:
    """Let the pickle run something: alone, first, last, or instead of a number."""
    import os
    import subprocess
    from pathlib import Path

    code = f"open({marker!r}, 'w').close()"
    call = rng.choice(
        (
            _Call(os.system, f"touch '{marker}'"),
            _Call(exec, code),
            _Call(eval, f"open({marker!r}, 'w').close()"),
            _Call(Path.touch, Path(marker)),
            _Call(subprocess.call, ["touch", marker]),
            _Call(getattr, _Call(__import__, "os"), "system"),
            _Call(map, os.mkdir, [marker]),
            _Call(pickle.loads, pickle.dumps(_Call(os.mkdir, marker))),
        )
    )
    run = pickle.dumps(call, protocol=2)[2:-1]  # without PROTO and STOP
    if rng.random() < 0.3:
        return pickle.dumps(
            {"weight": call, "x": base64.b64encode(rng.randbytes(8))}, protocol=rng.choice((0, 2, 4))
        )
    if rng.random() < 0.2:
        return b"\x80\x02" + f"cos\nmkdir\n(V{marker}\ntR.".encode("raw_unicode_escape")
    if rng.random() < 0.5:
        return data[:2] + run + b"0" + data[2:]  # POP: the rest is as it was
    return data[:-1] + run + b"0."


# Shards.


def _edit_tar(data: bytes, rng: Random, _marker: str) -> bytes:
    """Change a field of a header and make its sum right again."""
    starts = [at for at in range(0, len(data) - 511, 512) if data[at + 257 : at + 262] == b"ustar"]
    at = rng.choice(starts)
    header = bytearray(data[at : at + 512])
    fields = {0: 100, 100: 8, 124: 12, 136: 12, 156: 1, 157: 100, 257: 8, 345: 155}
    place = rng.choice(list(fields))
    sizes = (
        b"77777777777\0",
        b"-0000000001\0",
        b"\x80" + b"\xff" * 11,
        b"\xff" * 12,
        b"00000000000\0",
        b"99999999999\0",
    )
    texts = [name.encode(errors="replace")[: fields[place]] for name in _NAMES]
    value = rng.choice(sizes if place in (124, 136) else [bytes([rng.choice(b"0123456789ALKSxgMNDV\0")])])
    if place not in (124, 136, 156):
        value = rng.choice(texts)
    header[place : place + fields[place]] = value.ljust(fields[place], b"\0")[: fields[place]]
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % (sum(header) % 8**6)
    return data[:at] + bytes(header) + data[at + 512 :]


def _remake_tar(data: bytes, rng: Random, _marker: str) -> bytes:
    """Members in another order, doubled, of another kind, or under odd names."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = [(info, file.read()) for info in tar if (file := tar.extractfile(info))]
    rng.shuffle(members)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=rng.choice((0, 1, 2))) as tar:
        for info, content in [*members, *members[:1]]:
            if rng.random() < 0.3:
                info.name = (
                    rng.choice(_NAMES).replace("\0", "_").encode(errors="replace").decode() or info.name
                )
            if rng.random() < 0.2:
                info.type, info.linkname = rng.choice((b"1", b"2", b"3", b"5", b"6")), "../../../etc/passwd"
                info.size, content = 0, b""
            if rng.random() < 0.2:
                content = content[: len(content) // 2]
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


# Pictures.


def _edit_png(data: bytes, rng: Random, _marker: str) -> bytes:
    """Change, drop or double a chunk, and make its sum right again."""
    chunks, at = [], 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    place = rng.randrange(len(chunks))
    kind, content = chunks[place]
    how = rng.randrange(4)
    if how == 0:
        del chunks[place]
    elif how == 1:
        chunks.insert(place, chunks[place])
    elif how == 2:
        chunks[place] = (kind, _write_edge(content, rng, b"") if content else rng.randbytes(9))
    else:
        kinds = (b"tEXt", b"iTXt", b"zTXt", b"iCCP", b"eXIf", b"acTL", b"tRNS", b"PLTE")
        chunks.insert(1, (rng.choice(kinds), rng.randbytes(rng.choice((0, 1, 7, 300)))))
    made = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    ]
    return data[:8] + b"".join(made)


_Knowing = Callable[[bytes, Random, str], bytes]
_KNOWING: Final[dict[str, tuple[_Knowing, ...]]] = {
    "safetensors": (_edit_header, _edit_header, _resize_tensor, _put_numbers),
    "json": (_edit_json,),
    "jsonl": (_edit_jsonl,),
    "yaml": (_edit_yaml, _edit_yaml, _make_yaml),
    "gguf": (_edit_gguf,),
    "ckpt": (_edit_archive,),
    "pt": (_edit_pickle, _put_payload),
    "tar": (_edit_tar, _remake_tar),
    "png": (_edit_png,),
}
