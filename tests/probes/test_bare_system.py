"""A system without `fcntl`, `resource`, /proc and `fork`, as Windows is: what watches and what writes go on."""

import subprocess
import sys
from pathlib import Path

import pytest

BARE = """
import os, sys
import psutil, torch  # which need more of a system than we do
sys.modules["fcntl"] = sys.modules["resource"] = None
del os.fork, os.preadv, os.register_at_fork
open_file = os.open
def refused(path, *args, **kwargs):
    if str(path).startswith("/proc"):
        raise FileNotFoundError(2, "planted", str(path))
    return open_file(path, *args, **kwargs)
os.open = refused

from safetensors.torch import load_file, save_file
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.monitor import Recorder
from sigmascope.probes.host import memory_snapshot, process_peak_rss_bytes, process_rss_bytes
from sigmascope.records.serialization import load_run, save_run

assert process_rss_bytes() > 0 and memory_snapshot().process_rss_bytes > 0
assert process_peak_rss_bytes() is None
recorder = Recorder("bare")
with recorder, recorder.stage("denoising"):
    for _ in range(3):
        with recorder.step():
            pass
save_run(recorder.run(), "run.json")
assert len(load_run("run.json").stages[0].steps) == 3

generator = torch.Generator().manual_seed(0)
key = "denoiser.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q.weight"
base = {key: torch.randn(24, 40, generator=generator)}
change = torch.randn(24, 2, generator=generator) @ torch.randn(2, 40, generator=generator)
save_file(base, "base.safetensors")
save_file({key: base[key] + change}, "tuned.safetensors")
extract_lora("base.safetensors", "tuned.safetensors", "lora.safetensors", ExtractOptions(rank=2, workers=2))
made = load_file("lora.safetensors")
up, down = (next(made[name].float() for name in made if part in name) for part in ("lora_up", "lora_down"))
torch.testing.assert_close(up @ down, change, atol=1e-2, rtol=1e-2)  # float16
assert not [name for name in os.listdir() if name.startswith(".") or name.endswith(".tmp")]
"""


@pytest.mark.slow
def test_records_and_files_are_made_there_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BARE], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
