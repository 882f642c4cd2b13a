import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sigmascope.checkpoints import StreamingWriter, safetensors, save_safetensors

WRITES_AND_WAITS = """
    import sys, time, torch
    from sigmascope.checkpoints import StreamingWriter

    with StreamingWriter(sys.argv[1]) as writer:
        writer.write("a", torch.zeros(1000))
        print("half", flush=True)
        time.sleep(300)
"""
STREAMS_MUCH = """
    import resource, sys, torch
    from sigmascope.checkpoints import StreamingWriter, open_checkpoint

    def peak_kb():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def work(count):
        with StreamingWriter(sys.argv[1]) as writer:
            for number in range(count):
                writer.write(str(number), torch.full((1024, 1024), float(number)).T)
        with open_checkpoint(sys.argv[1]) as checkpoint:
            for key in checkpoint:
                checkpoint.tensor(key)

    work(3)
    before = peak_kb()
    work(12)
    print(peak_kb() - before)
"""


def run(code: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def write_and(path: Path, then: Callable[[], None]) -> None:
    with StreamingWriter(path) as target:
        target.write("a", torch.zeros(10))
        target.write("odd", torch.zeros(3))
        then()


def test_a_killed_process_leaves_the_target_and_the_next_one_clears_up(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_safetensors(path, {"old": torch.ones(2)})
    with run(WRITES_AND_WAITS, str(path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert load_file(path)["old"].tolist() == [1.0, 1.0]
    assert len(names(tmp_path)) == 2
    save_safetensors(path, {"new": torch.ones(1)})
    assert names(tmp_path) == ["x.safetensors"]
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


def test_memory_holds_a_few_tensors_however_many_are_written(tmp_path: Path) -> None:
    with run(STREAMS_MUCH, str(tmp_path / "x.safetensors")) as process:
        output, _ = process.communicate(timeout=300)
    growth_kb = int(output)
    assert growth_kb < 16 * 1024  # four tensors of 4 MB; all of them are 48 MB
