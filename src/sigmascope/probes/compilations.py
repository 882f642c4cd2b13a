"""What torch.compile did in a while: how often it compiled, for how long, why again, and what its cache held.

PyTorch keeps its last 64 compilations, with their times and the guard that had failed (`torch._dynamo.utils.CompilationMetrics`).
Guards may hold words of a prompt, so that of each only the kind, a tensor's name and its sizes or types are kept.
"""

import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from sigmascope.probes.reading import Reading, attempt
from sigmascope.records.performance import Compilations

_UTILS: Final = "torch._dynamo.utils"
"""What has compiled nothing has not loaded it."""
_MISMATCH: Final = re.compile(
    r"tensor '([\w.\[\]]{1,60})' (size|stride|rank|dtype|device|requires_grad)[a-z ]*mismatch"
    r"(?: at index (\d+))?\. expected ([\w.]+=?[\w.]*), actual ([\w.]+)"
)
_OTHERS: Final = (
    (re.compile(r"size\(\)\[|stride\(\)\[|\bs\d+\b|Eq\(|Mod\("), "a bound on sizes"),
    (re.compile(r"grad_mode|is_grad_enabled|inference_mode"), "gradients are on or off"),
    (re.compile(r"autocast"), "autocast"),
    (re.compile(r"GLOBAL_STATE|global.state"), "a switch of PyTorch"),
    (re.compile(r"___check_obj_id|___check_type_id|BACKEND_MATCH"), "another object or type"),
    (re.compile(r"len\(|==|in "), "another value"),
)
_LIMIT: Final = re.compile(r"recompile.limit|cache.size.limit", re.IGNORECASE)
_MOST_REASONS: Final = 3


def compilations_since(nanoseconds: int) -> Reading[Compilations]:
    """What was compiled in this process since so long ago. Never raises, and imports nothing.

    Args:
        nanoseconds: From now back.

    Returns:
        None without a reason where the process has compiled nothing at all.
    """
    utils = sys.modules.get(_UTILS)
    known = Reading(None) if utils is None else attempt(lambda: utils.get_compilation_metrics())
    compilations = known.value
    if not compilations:
        return Reading(None, known.reason)
    since_us = (time.time_ns() - nanoseconds) // 1000
    return attempt(lambda: _sum_of([one for one in compilations if _began(one) >= since_us]))


def _began(compilation: Any) -> int:
    return int(getattr(compilation, "start_time_us", None) or 0)


def _sum_of(compilations: Sequence[Any]) -> Compilations:
    made = [one for one in compilations if getattr(one, "fail_type", None) is None]
    why = Counter(map(_in_words, filter(None, (getattr(one, "recompile_reason", None) for one in made))))
    return Compilations(
        count=len(made),
        seconds=sum(_numbers(made, "duration_us")) / 1e6,
        why=tuple(reason for reason, _ in why.most_common(_MOST_REASONS)),
        from_cache=sum(_numbers(made, "inductor_fx_local_cache_hit_count")),
        not_in_cache=sum(_numbers(made, "inductor_fx_local_cache_miss_count")),
        gave_up=any(_LIMIT.search(str(getattr(one, "fail_reason", ""))) for one in compilations),
    )


def _numbers(compilations: Iterable[Any], name: str) -> list[int]:
    return [int(getattr(one, name, None) or 0) for one in compilations]


def _in_words(reason: str) -> str:
    """Why a function was compiled again, such as "sample has 8 at index 2, not 4"; nothing of it that may be a prompt's."""
    found = _MISMATCH.search(reason)
    if found is not None:
        name, what, index, expected, actual = found.groups()
        where = f"{what} at index {index}" if index else what
        return f"the {where} of {name} is {actual}, not {expected.rpartition('=')[2]}"
    return next((words for pattern, words in _OTHERS if pattern.search(reason)), "another guard failed")
