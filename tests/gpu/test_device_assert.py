"""A kernel that asserts: the host gets its own exception, and the record is written."""

from pathlib import Path

import pytest
import torch
from tests.gpu.children import run_child

from sigmascope import load_run

pytestmark = pytest.mark.gpu

CHILD = """
import sys, torch
import sigmascope
from sigmascope.monitor import Recorder

device, path = sys.argv[1:]
recorder = Recorder("asserting", sample_hz=10.0)
table, index = torch.ones(4, device=device), torch.tensor([1 << 20], device=device)
caught = None
try:
    with recorder, recorder.stage("denoising"), recorder.step():
        float(table[index].sum())  # where the host learns of it
except Exception as error:
    caught = error
print(type(caught).__module__ + "." + type(caught).__name__)
print(str(caught).splitlines()[0])
run = recorder.run()
run.save(path)
print("saved", flush=True)
import os
os._exit(0)  # the driver's own teardown of a broken context is not what is looked at
"""


def test_the_hosts_exception_arrives_and_the_record_is_written(device: torch.device, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    done = run_child(CHILD, device.type, path)
    assert done.returncode == 0, done.stderr[-3000:]
    kind, text, saved = done.stdout.splitlines()[-3:]
    if device.type == "cuda":
        assert kind in ("torch.AcceleratorError", "torch._C.AcceleratorError", "builtins.RuntimeError")
        assert "device-side assert triggered" in text
    else:
        assert kind == "builtins.IndexError"
    assert saved == "saved"
    stage = load_run(path).stages[0]
    assert stage.name == "denoising"
    assert stage.success is False
    assert len(stage.steps) == 1
    assert all(seconds is None or seconds >= 0 for seconds in stage.steps.gpu_seconds)
    details = stage.exception_details
    assert details is not None
