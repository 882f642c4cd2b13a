"""Start threads so that Ctrl-C leaves none behind that nobody knows of."""

import threading


def start_thread(thread: threading.Thread, stop: threading.Event) -> None:
    """Start a thread that ends once `stop` is set.

    Ctrl-C during the start sets `stop` too: the thread may run already without the caller knowing of it.

    Raises:
        RuntimeError: The system gives no more threads.
    """
    try:
        thread.start()
    except BaseException:
        stop.set()
        raise
