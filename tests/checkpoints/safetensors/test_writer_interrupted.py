import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sigmascope.checkpoints import StreamingWriter, safetensors, save_safetensors

STREAMS_MUCH_THEN_WAITS = """
    import resource, sys, time, torch
    from sigmascope.checkpoints import StreamingWriter, open_checkpoint

    def peak_kb():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def work(count):
        with StreamingWriter(sys.argv[2]) as writer:
            for number in range(count):
                writer.write(str(number), torch.full((1024, 1024), float(number)).T)
        with open_checkpoint(sys.argv[2]) as checkpoint:
            for key in checkpoint:
                checkpoint.tensor(key)

    work(3)
    before = peak_kb()
    work(12)
    print(peak_kb() - before, flush=True)
    with StreamingWriter(sys.argv[1]) as writer:
        writer.write("a", torch.zeros(1000))
        print("half", flush=True)
        time.sleep(300)
"""


@dataclass(frozen=True)
class Killed:
    """What a process left that was killed while it wrote."""

    path: Path
    growth_kb: int


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("killed")
    path = folder / "x.safetensors"
    save_safetensors(path, {"old": torch.ones(2)})
    much = tmp_path_factory.mktemp("much") / "much.safetensors"
    command = [sys.executable, "-c", textwrap.dedent(STREAMS_MUCH_THEN_WAITS), str(path), str(much)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        growth_kb = int(process.stdout.readline())
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    return Killed(path, growth_kb)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def write_and(path: Path, then: Callable[[], None]) -> None:
    with StreamingWriter(path) as target:
        target.write("a", torch.zeros(10))
        target.write("odd", torch.zeros(3))
        then()


@pytest.mark.slow
def test_a_killed_process_leaves_the_target_and_the_next_one_clears_up(killed: Killed) -> None:
    path = killed.path
    assert load_file(path)["old"].tolist() == [1.0, 1.0]
    assert len(names(path.parent)) == 2
    save_safetensors(path, {"new": torch.ones(1)})
    assert names(path.parent) == ["x.safetensors"]
    assert list(load_file(path)) == ["new"]


def test_ctrl_c_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_and(tmp_path / "x.safetensors", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert names(tmp_path) == []


@pytest.mark.parametrize("where", ["encoded_header", "aligned_order", "move_bytes"])
def test_ctrl_c_while_finishing_leaves_the_old_file(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and(path, lambda: monkeypatch.setattr(safetensors, where, interrupted))
    assert (path.read_bytes(), names(tmp_path)) == (b"old", ["x.safetensors"])


def test_ctrl_c_while_opening_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.disk_usage", interrupted)
    with pytest.raises(KeyboardInterrupt), StreamingWriter(tmp_path / "x.safetensors"):
        pass
    assert names(tmp_path) == []


@pytest.mark.slow
def test_memory_holds_a_few_tensors_however_many_are_written(killed: Killed) -> None:
    assert killed.growth_kb < 16 * 1024  # four tensors of 4 MB; all of them are 48 MB
