"""The start of a thread of ours, so that Ctrl-C leaves none that nobody knows."""

import threading


def start_thread(thread: threading.Thread, stop: threading.Event) -> None:
    """Start a thread that ends once `stop` is set.

    Ctrl-C in the middle of that sets it: the thread may run already, and the caller has not learnt of it.

    Raises:
        RuntimeError: The system gives no more threads.
    """
    try:
        thread.start()
    except BaseException:
        stop.set()
        raise
