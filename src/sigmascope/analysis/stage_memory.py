"""What stages of one name left in use, in the process and on each device."""

from collections.abc import Iterator, Mapping, Sequence

from sigmascope.records.run import Stage

HEAP = "heap_in_use_bytes"
"""The fact of a stage that holds what malloc had given out, `{"before": …, "after": …}`."""

PROCESS, HEAP_OF_PROCESS = "process", "the process's heap"

Measure = tuple[str, list[int], list[int]]


def after_each(stages: Sequence[Stage]) -> Iterator[list[Measure]]:
    """Of the process, then of every device: where, bytes in use at the end of each stage, and how much each added.

    The process has two measures, the better one first.
    """
    impacts = [stage.memory for stage in stages if stage.memory is not None]
    heap = [_heap(stage) for stage in stages]
    process = [(i.baseline.process_rss_bytes, i.current.process_rss_bytes) for i in impacts]
    yield [(HEAP_OF_PROCESS, *_ends_and_changes(heap)), (PROCESS, *_ends_and_changes(process))]
    for device in dict.fromkeys(memory.device for i in impacts for memory in i.current.accelerators):
        pairs = [
            (i.baseline.accelerator(device).allocated_bytes, i.current.accelerator(device).allocated_bytes)
            for i in impacts
        ]
        yield [(device, *_ends_and_changes(pairs))]


def _heap(stage: Stage) -> tuple[int | None, int | None]:
    noted = stage.facts.get(HEAP)
    before, after = (noted.get(name) if isinstance(noted, Mapping) else None for name in ("before", "after"))
    return before if isinstance(before, int) else None, after if isinstance(after, int) else None


def _ends_and_changes(pairs: Sequence[tuple[int | None, int | None]]) -> tuple[list[int], list[int]]:
    known = [(before, after) for before, after in pairs if before is not None and after is not None]
    return [after for _, after in known], [after - before for before, after in known]
