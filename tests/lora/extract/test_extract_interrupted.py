"""Extraction in a process of its own that is stopped in the middle."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from sigmascope.lora.extract import extract_lora

if TYPE_CHECKING:
    from tests.conftest import MakePair, ModelPair

pytestmark = [pytest.mark.skipif(os.name == "nt", reason="POSIX signals"), pytest.mark.slow]

# It says when four layers are written, and then waits to be stopped. Not in one long wait: a signal that comes just
# before the wait begins would be answered when that ends.
EXTRACT_AND_WAIT = """
import sys, time
from sigmascope.lora.extract import extract_lora

def progress(done, total, layer):
    if done == 4:
        print("four layers", flush=True)
        while True:
            time.sleep(0.01)

extract_lora(*sys.argv[1:4], progress=progress)
"""


def stop_half_way(files: "ModelPair", target: Path, number: signal.Signals) -> int:
    """Start an extraction, send the signal after its fourth layer, and give the exit status."""
    command = [sys.executable, "-c", EXTRACT_AND_WAIT, *map(str, (files.base, files.tuned, target))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "four layers\n"
            process.send_signal(number)
            return process.wait(timeout=30)
        finally:
            process.kill()  # leaving the block waits for it without end


def test_a_killed_extraction_leaves_the_earlier_lora_as_it_was_and_the_next_one_works(
    make_model_pair: "MakePair",
) -> None:
    files = make_model_pair()
    target = files.base.with_name("lora.safetensors")
    report = extract_lora(files.base, files.tuned, target)
    before = target.read_bytes(), report.sidecar.read_bytes()
    assert stop_half_way(files, target, signal.SIGKILL) == -signal.SIGKILL
    assert (target.read_bytes(), report.sidecar.read_bytes()) == before
    target.unlink()
    extract_lora(files.base, files.tuned, target)
    assert len(load_file(target)) == 3 * len(files.layers)


def test_ctrl_c_leaves_no_file_at_all(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    target = files.base.with_name("lora.safetensors")
    assert stop_half_way(files, target, signal.SIGINT) != 0
    assert sorted(path.name for path in target.parent.iterdir()) == ["base.safetensors", "tuned.safetensors"]
