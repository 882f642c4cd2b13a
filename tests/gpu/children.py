"""Code that runs in a process of its own: it needs another allocator, or breaks its device."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_child(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code, with the repository's modules and further variables."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def told_by(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON of the child's last line."""
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
