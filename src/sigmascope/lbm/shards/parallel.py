"""Work done ahead on background threads, its results in the order of its inputs."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


def map_ahead(
    work: Callable[[In], Out], items: Iterator[In], *, workers: int, ahead: int
) -> Generator[Out, None, None]:
    """Map `work` over `items`, with up to `ahead` results computed before they are asked for.

    When the caller stops early and closes the iterator, no thread stays behind.

    Args:
        work: Runs on a worker; what it raises is raised here, in its place.
        items: Taken on the caller's thread.
        workers: Threads; 0 works on the caller's.
        ahead: Bounds the memory that results take.
    """
    if workers == 0:
        for item in items:
            yield work(item)
        return
    waiting: deque[Future[Out]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="sigmascope-data")
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
