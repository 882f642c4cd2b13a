"""Sigmascope's own threads in this process. Those of an earlier test may still be there: one that publishes, say."""

import threading


def own_threads() -> set[threading.Thread]:
    """All that live now."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("sigmascope-")}
