"""Every writer in every place where writing goes wrong: full disks, read-only folders, links, odd names, folders that vanish.

A writer gives a clear error or a right file. Either way the folder holds no half file and no temporary one, an earlier
file of that name is whole, and nothing elsewhere has changed. Where root may, disks are real: a tmpfs in a mount
namespace of the try's own, and root's right to pass over permissions given up.
"""

import contextlib
import ctypes
import hashlib
import io
import os
import random
import resource
import shutil
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image
from safetensors.torch import load
from tests.chaos.made_files import LAYERS, make_specimens
from tests.chaos.tries import Case, Kind

import sigmascope
from sigmascope.cli import root
from sigmascope.errors import SigmascopeError
from sigmascope.lbm.images import load_image, save_image
from sigmascope.lbm.make_shards import ShardTarget, write_shards
from sigmascope.lbm.pocket.demo import run_demo
from sigmascope.lbm.shards import read_shard
from sigmascope.lora.checkpoint_merge import merge_into_checkpoint
from sigmascope.lora.convert import convert_lora
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.merge import CombineOptions, merge_lora_files
from sigmascope.lora.ranks import FixedRank, RankRules
from sigmascope.lora.resize import RankPlan, resize_lora

_PLAN: Final = RankPlan(RankRules(FixedRank(1, 1)))
_BASE, _TUNED = "inputs/base.safetensors", "inputs/tuned.safetensors"
_LORA, _RUN = "inputs/other.safetensors", "inputs/run.json"
_BLOCK: Final = 4096
_LONGEST_MESSAGE: Final = 12  # lines


# What writes. Each takes the target; folders are targets of some.


def _extract(target: Path) -> None:
    options = ExtractOptions(rank=2, conv_rank=2, save_precision="float", workers=1)
    extract_lora(_BASE, _TUNED, target, options)


def _resize(target: Path) -> None:
    resize_lora(_LORA, target, _PLAN)


def _combine(target: Path) -> None:
    merge_lora_files([_LORA, _LORA], target, CombineOptions())


def _convert(target: Path) -> None:
    convert_lora(_LORA, target, "kohya")


def _bake(target: Path) -> None:
    merge_into_checkpoint([_LORA], _BASE, target)


def _save_run(target: Path) -> None:
    sigmascope.load_run(_RUN).save(target)


def _trace(target: Path) -> None:
    sigmascope.load_run(_RUN).to_trace(target)


def _dump(target: Path) -> None:
    sigmascope.save_tensors(target, {"latent": torch.ones(4096)}, prompt="a cat")


def _picture(target: Path) -> None:
    pixels = random.Random(0).randbytes(3 * 96 * 96)
    save_image(Image.frombytes("RGB", (96, 96), pixels), target)


def _command(target: Path) -> None:
    """The same through the command line, which prints the name."""
    out = io.StringIO()
    before = sys.argv
    sys.argv = ["sigmascope", "lora", "resize", _LORA, str(target), "--rank", "1", "--conv_rank", "1"]
    if target.name.startswith("-"):
        sys.argv.insert(4, "--")
        sys.argv = [*sys.argv[:3], *sys.argv[6:], *sys.argv[3:6]]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            root.run()
    except SystemExit as leaving:
        if leaving.code:
            raise SigmascopeError(out.getvalue()) from leaving
    finally:
        sys.argv = before
    odd = {char for char in out.getvalue() if not char.isprintable() and char != "\n"}
    assert not odd, f"control characters in the output: {odd}"
    assert "Traceback" not in out.getvalue()


def _dumps(target: Path) -> None:
    dumps = sigmascope.TensorDumps(target)
    for number in range(3):
        dumps.save(f"step {number}", torch.ones(2048))


def _shards(target: Path) -> None:
    picture = io.BytesIO()
    Image.frombytes("RGB", (64, 64), random.Random(0).randbytes(3 * 64 * 64)).save(picture, format="PNG")
    members = {"source.png": picture.getvalue(), "target.png": picture.getvalue()}
    write_shards(((f"{n:03d}", members) for n in range(4)), ShardTarget(target, shard_size=2, overwrite=True))


def _demo(target: Path) -> None:
    run_demo(target, rank=1, conv_rank=1, num_inference_steps=1)


def _tensors_are_whole(target: Path) -> None:
    tensors = load(target.read_bytes())  # safetensors opens no path that is not UTF-8
    assert tensors
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def _dumps_are_whole(target: Path) -> None:
    dumps = sigmascope.TensorDumps(target)
    assert all(torch.equal(tensor, torch.ones(2048)) for name in dumps for tensor in dumps[name].values())


def _shards_are_whole(target: Path) -> None:
    samples = [sample for shard in target.glob("*.tar") for sample in read_shard(str(shard), ("source",))]
    assert len(samples) == 4
    assert not any(sample.fault for sample in samples)


@dataclass(frozen=True)
class _Writer:
    """What writes.

    Attributes:
        write: Writes to a target.
        name: The target's usual name.
        is_whole: Asserts that a target is right.
        reads: Its inputs, which may not be its target.
        beside: What else it writes, given the target's stem.
        to_folder: Whether the target is a folder.
    """

    write: Callable[[Path], None]
    name: str
    is_whole: Callable[[Path], object]
    reads: tuple[str, ...] = ()
    beside: Callable[[str], tuple[str, ...]] = lambda _stem: ()
    to_folder: bool = False


_WRITERS: Final = (
    _Writer(
        _extract,
        "out.safetensors",
        _tensors_are_whole,
        (_BASE, _TUNED),
        lambda stem: (f"{stem}_config.yaml",),
    ),
    _Writer(_resize, "out.safetensors", _tensors_are_whole, (_LORA,)),
    _Writer(_combine, "out.safetensors", _tensors_are_whole, (_LORA,)),
    _Writer(_convert, "out.safetensors", _tensors_are_whole, (_LORA,)),
    _Writer(_bake, "out.safetensors", _tensors_are_whole, (_LORA, _BASE)),
    _Writer(_command, "out.safetensors", _tensors_are_whole, (_LORA,)),
    _Writer(_save_run, "out.json", sigmascope.load_run),
    _Writer(_trace, "out.json", lambda path: path.read_text().index("traceEvents")),
    _Writer(_dump, "out.safetensors", _tensors_are_whole),
    _Writer(_picture, "out.png", load_image),
    _Writer(_dumps, "out", _dumps_are_whole, to_folder=True),
    _Writer(_shards, "out", _shards_are_whole, to_folder=True),
    _Writer(_demo, "out", lambda path: _tensors_are_whole(path / "pocket_lora.safetensors"), to_folder=True),
)


# Where it is written. Each gets the target's usual path and yields the one to use, in the state to write in.


@dataclass(frozen=True)
class _Scene:
    """Where a try is.

    Attributes:
        folder: Of the target.
        target: In it.
        outside: A folder that nobody may touch.
        random: Draws what a situation leaves open.
        writer: What will write.
        allowed: Files outside that may change, as the target of a link may.
    """

    folder: Path
    target: Path
    outside: Path
    random: random.Random
    writer: "_Writer"
    allowed: set[str] = field(default_factory=set)


_Situation = Callable[[_Scene], contextlib.AbstractContextManager[Path]]


@contextlib.contextmanager
def _full_disk(scene: _Scene) -> Iterator[Path]:
    with _tmpfs(scene.folder, pages=scene.random.choice((1, 2, 3, 5))):
        yield scene.target


@contextlib.contextmanager
def _full_disk_with_an_earlier_file(scene: _Scene) -> Iterator[Path]:
    with _tmpfs(scene.folder, pages=3):
        _write_earlier(scene)
        yield scene.target


def _write_earlier(scene: _Scene) -> None:
    if scene.writer.to_folder:
        scene.target.mkdir()
        (scene.target / "earlier.txt").write_text("earlier")
    else:
        scene.target.write_text("earlier")


@contextlib.contextmanager
def _limited_files(scene: _Scene) -> Iterator[Path]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (scene.random.choice((0, 1, 100, 2000)), most))
    try:
        yield scene.target
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@contextlib.contextmanager
def _read_only_disk(scene: _Scene) -> Iterator[Path]:
    with _tmpfs(scene.folder, pages=100) as is_mounted:
        if scene.random.random() < 0.5:
            _write_earlier(scene)
        if is_mounted:
            _mount(None, scene.folder, flags=_REMOUNT | _READ_ONLY)
            yield scene.target
        else:
            with _mode(scene.folder, 0o555):
                yield scene.target


@contextlib.contextmanager
def _read_only_folder(scene: _Scene) -> Iterator[Path]:
    if scene.random.random() < 0.5:
        _write_earlier(scene)
    with _mode(scene.folder, 0o555):
        yield scene.target


@contextlib.contextmanager
def _closed_folder(scene: _Scene) -> Iterator[Path]:
    with _mode(scene.folder, 0o000):
        yield scene.target


@contextlib.contextmanager
def _unlisted_folder(scene: _Scene) -> Iterator[Path]:
    """One that may be written to and not listed."""
    with _mode(scene.folder, 0o333):
        yield scene.target


@contextlib.contextmanager
def _closed_file(scene: _Scene) -> Iterator[Path]:
    _write_earlier(scene)
    with _mode(scene.target, scene.random.choice((0o000, 0o444))):
        yield scene.target


@contextlib.contextmanager
def _vanishing_folder(scene: _Scene) -> Iterator[Path]:
    """The folder goes when the first file is flushed to the disk, or when it is renamed."""
    patched = scene.random.choice(("fsync", "replace"))
    original = getattr(os, patched)

    def remove_first(*arguments: Any, **more: Any) -> Any:
        shutil.rmtree(scene.folder, ignore_errors=True)
        return original(*arguments, **more)

    setattr(os, patched, remove_first)
    try:
        yield scene.target
    finally:
        setattr(os, patched, original)


@contextlib.contextmanager
def _failing_write(scene: _Scene) -> Iterator[Path]:
    """Flushing fails, as it does on a network disk that is full: no call before it says so."""
    original = os.fsync

    def fail(_descriptor: object) -> None:
        raise OSError(scene.random.choice((28, 5, 122)), "No room, or no disk")

    os.fsync = fail  # type: ignore[assignment]
    try:
        yield scene.target
    finally:
        os.fsync = original


@contextlib.contextmanager
def _link_outside(scene: _Scene) -> Iterator[Path]:
    """A link is followed: what it leads to is the target."""
    elsewhere = scene.outside / f"linked{scene.target.suffix}"
    if scene.writer.to_folder:
        elsewhere.mkdir()
    elif scene.random.random() < 0.5:
        elsewhere.write_text("earlier")
    scene.target.symlink_to(elsewhere)
    scene.allowed.add(str(elsewhere))
    scene.allowed.update(str(scene.outside / name) for name in ("linked_config.yaml",))
    yield scene.target
    assert scene.target.is_symlink(), "the link was replaced"


@contextlib.contextmanager
def _link_in_a_ring(scene: _Scene) -> Iterator[Path]:
    scene.target.symlink_to(scene.target.with_name("other"))
    scene.target.with_name("other").symlink_to(scene.target)
    yield scene.target


@contextlib.contextmanager
def _link_to_an_input(scene: _Scene) -> Iterator[Path]:
    source = Path(scene.random.choice(scene.writer.reads or (str(scene.outside / "file"),))).resolve()
    if not scene.writer.reads:
        scene.allowed.add(str(source))
    if scene.random.random() < 0.5:
        scene.target.symlink_to(source)
    else:
        scene.target.hardlink_to(source)
    yield scene.target


@contextlib.contextmanager
def _odd_name(scene: _Scene) -> Iterator[Path]:
    names = (
        "\x1b[31mred\x1b]0;title\x07",
        "two\nlines",
        "tab\tand\rreturn",
        "x" * 250,
        "x" * 5000,
        "é" * 120,
        "\udcff\udcfe",
        "-rf",
        "--help",
        " ",
        "..x",
        "[bold]",
        "a'b\"c",
        "\u202eflipped",
        "nul\0",
    )
    yield scene.target.with_name(scene.random.choice(names) + scene.target.suffix)


@contextlib.contextmanager
def _odd_folder(scene: _Scene) -> Iterator[Path]:
    folder = scene.folder / scene.random.choice(
        ("\x1b[31mred", "a\nb", "\udcff", "-x", "~", "new/er/est", "x" * 300)
    )
    yield folder / scene.target.name


@contextlib.contextmanager
def _below_a_file(scene: _Scene) -> Iterator[Path]:
    (scene.folder / "file").write_text("a file")
    yield scene.folder / "file" / scene.target.name


@contextlib.contextmanager
def _other_kind(scene: _Scene) -> Iterator[Path]:
    """A folder where a file should go, or a file where a folder should; a pipe; a socket."""
    kind = scene.random.choice(("wrong", "pipe", "socket"))
    if kind == "pipe":
        os.mkfifo(scene.target)
    elif kind == "socket":
        there = socket.socket(socket.AF_UNIX)
        os.chdir(scene.folder)  # a socket's path may not be long
        there.bind(scene.target.name)
        os.chdir(scene.folder.parent)
    elif scene.writer.to_folder:
        scene.target.write_text("earlier")
    else:
        scene.target.mkdir()
        (scene.target / "earlier.txt").write_text("earlier")
    yield scene.target


@contextlib.contextmanager
def _replaced(scene: _Scene) -> Iterator[Path]:
    """Nothing is wrong; an earlier file is there."""
    _write_earlier(scene)
    yield scene.target


_SITUATIONS: Final[tuple[_Situation, ...]] = (
    _full_disk,
    _full_disk_with_an_earlier_file,
    _limited_files,
    _read_only_disk,
    _read_only_folder,
    _closed_folder,
    _unlisted_folder,
    _closed_file,
    _vanishing_folder,
    _failing_write,
    _link_outside,
    _link_in_a_ring,
    _link_to_an_input,
    _odd_name,
    _odd_folder,
    _below_a_file,
    _other_kind,
    _replaced,
)
_ALL: Final = [(situation, writer) for situation in _SITUATIONS for writer in _WRITERS]


def attempt(case: Case) -> str:
    order = list(_ALL)
    random.Random(case.seed).shuffle(order)
    situation, writer = order[case.number % len(order)]
    print(f"{situation.__name__.strip('_')}: {writer.write.__name__.strip('_')}")  # noqa: T201
    shutil.copytree(case.prepared, "inputs")
    folder, outside = case.folder / "folder", case.folder / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "file").write_text("nobody's")
    scene = _Scene(folder, folder / writer.name, outside, case.random, writer)
    elsewhere = _contents(outside) | _contents(Path("inputs"))
    with situation(scene) as target:
        before = _contents(folder)
        try:
            writer.write(target)
            outcome = "a right file"
        except SigmascopeError as error:
            _check_message(str(error), target)
            outcome = "refused"
        with _all_rights():
            _judge(scene, writer, target, before, outcome)
    after = _contents(outside) | _contents(Path("inputs"))
    changed = {name for name in {*after, *elsewhere} if after.get(name) != elsewhere.get(name)}
    changed -= {name for name in changed for allowed in scene.allowed if name.startswith(allowed)}
    assert not changed, f"changed elsewhere: {sorted(changed)}"
    return outcome


def _judge(scene: _Scene, writer: _Writer, target: Path, before: Mapping[str, str], outcome: str) -> None:
    """What is in the folder now."""
    after = _contents(scene.folder)
    if outcome == "refused":
        if not writer.to_folder:
            assert all(after[name] == value for name, value in before.items() if name in after)
            new = set(after) - set(before) - {str(parent) for parent in target.parents}
        else:  # files that were finished before the error may stay
            kept = {
                name for name in after if Path(name).parent == target and not Path(name).name.startswith(".")
            }
            new = set(after) - set(before) - kept - {str(target), *map(str, target.parents)}
            if kept and writer.write is _dumps:
                _dumps_are_whole(target)
        assert not new, f"left behind: {sorted(new)}"
        return
    writer.is_whole(target)
    allowed = {str(target), *(str(target.with_name(name)) for name in writer.beside(target.stem))}
    new = {name for name in set(after) - set(before) - allowed if not target.is_relative_to(name)}
    if writer.to_folder:
        new = {
            name for name in new if not Path(name).is_relative_to(target) or Path(name).name.startswith(".")
        }
    assert not new, f"beside it: {sorted(new)}"


def _check_message(text: str, target: Path) -> None:
    assert text.count("\n") - 2 * target.name.count("\n") < _LONGEST_MESSAGE, (
        f"an error of {text.count(chr(10))} lines"
    )
    assert "Traceback" not in text
    plain = (target.stem[:20], target.name[:20], target.parent.name[:20], "--", ".safetensors", *LAYERS)
    assert any(name and name in text for name in plain) or not target.name.isprintable(), (
        f"names nothing: {text}"
    )


def _contents(folder: Path) -> dict[str, str]:
    """What is there by path: of files the sum, of links where they lead, else the kind."""
    with _all_rights():
        return {str(path): _state_of(path) for path in folder.rglob("*")}


def _state_of(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"link to {os.readlink(path)}"  # noqa: PTH115 - bytes that are no text, too
    return hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(mode) else str(stat.S_IFMT(mode))


# Disks and rights.

_NEW_MOUNTS: Final = 0x00020000
_READ_ONLY: Final = 1
_REMOUNT: Final = 32
_PRIVATE: Final = 0x44000
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def _tmpfs(folder: Path, pages: int) -> Iterator[bool]:
    """Mount a small disk that goes with this process; without the right to, files may not grow instead."""
    try:
        if _LIBC.unshare(_NEW_MOUNTS):
            raise OSError(ctypes.get_errno(), "unshare")
        _mount(None, Path("/"), flags=_PRIVATE)
        _mount("tmpfs", folder, options=f"size={pages * _BLOCK}")
    except OSError:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (pages * _BLOCK, most))
        yield False
    else:
        yield True


def _mount(kind: str | None, folder: Path, *, flags: int = 0, options: str = "") -> None:
    name = None if kind is None else kind.encode()
    if _LIBC.mount(name, os.fsencode(folder), name, flags, options.encode() or None):
        raise OSError(ctypes.get_errno(), "mount", str(folder))


@contextlib.contextmanager
def _mode(path: Path, mode: int) -> Iterator[None]:
    """Give a path these permission bits, and keep root from passing over them."""
    before = stat.S_IMODE(path.stat().st_mode)
    path.chmod(mode)
    _set_capabilities(~_PASSING_OVER)
    try:
        yield
    finally:
        _set_capabilities(0xFFFFFFFF)
        path.chmod(before)


_PASSING_OVER: Final = 0b1110  # DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER
_VERSION: Final = 0x20080522


def _set_capabilities(wanted: int) -> None:
    """Take the effective capabilities of the permitted ones; who has none passes over nothing."""
    header, data = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    if _LIBC.capget(header, data):
        return
    data[0] = data[1] & wanted
    _LIBC.capset(header, data)


@contextlib.contextmanager
def _all_rights() -> Iterator[None]:
    """Look past permissions where this process may."""
    header, data = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    _LIBC.capget(header, data)
    effective = data[0]
    _set_capabilities(0xFFFFFFFF)
    try:
        yield
    finally:
        data[0] = effective
        _LIBC.capset(header, data)


def _prepare(folder: Path) -> Path:
    specimens = make_specimens(folder / "all")
    inputs = folder / "inputs"
    inputs.mkdir()
    lora = next(each.folder for each in specimens if each.family == "lora")
    for name in ("base.safetensors", "tuned.safetensors", "other.safetensors"):
        shutil.copy(lora / name, inputs)
    shutil.copy(
        next(each.folder for each in specimens if each.family == "run") / "in.json", inputs / "run.json"
    )
    return inputs


KIND = Kind(
    "disk",
    "a full, closed, vanishing or oddly named place gives a clear error or a right file, and loses nothing",
    tries=len(_ALL),
    attempt=attempt,
    prepare=_prepare,
    seconds=120.0,
)
