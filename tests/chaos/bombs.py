"""Files made to exhaust memory or time: each is refused, or read for what it is, in seconds and hundreds of megabytes.

The whole run tries each once; `test_bombs` holds each of them to the same, in the tests.
"""

import random
import time
from importlib import import_module
from pathlib import Path

from tests.chaos.bombs_made import BOMBS
from tests.chaos.tries import MB, Case, Kind

from sigmascope.errors import SigmascopeError

_MOST_SECONDS = 2.0  # of the process's own: what else the machine does is none of the file's business
_MODULES = (
    "gguf",
    "sigmascope.checkpoints",
    "sigmascope.lbm.data",
    "sigmascope.lbm.training.settings",
    "sigmascope.lora.apply",
    "sigmascope.lora.checkpoint_merge",
    "sigmascope.lora.compare",
    "sigmascope.lora.inspect",
    "sigmascope.lora.live_merge",
    "sigmascope.lora.resize",
    "sigmascope.lora.validate",
)


def attempt(case: Case) -> str:
    bombs = list(BOMBS)
    random.Random(f"{case.seed}/bombs").shuffle(bombs)
    bomb = bombs[case.number % len(bombs)]
    path = bomb.build(case.folder)
    before = set(Path().rglob("*"))
    outcome, message = "read for what it is", ""
    began = time.process_time()
    try:
        bomb.open(path)
    except SigmascopeError as error:
        outcome, message = "refused", str(error)
    seconds = time.process_time() - began
    left = {str(file) for file in Path().rglob("out*") if file not in before}
    assert not (message and left), f"left behind: {left}"
    assert len(message) < 10_000, f"an error of {len(message)} characters"
    assert seconds < _MOST_SECONDS, f"{bomb.kind}: took {seconds:.1f} s"
    return f"{bomb.kind.partition('_')[0]}: {outcome}"


def _prepare(_folder: Path) -> None:
    for name in _MODULES:
        import_module(name)


KIND = Kind(
    "bombs",
    "a file made to exhaust memory or time costs at most 500 MB and 2 s",
    tries=len(BOMBS),
    attempt=attempt,
    prepare=_prepare,
    seconds=60.0,
    memory=500 * MB,
)
