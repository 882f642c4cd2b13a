"""Watching that begins by itself in a process whose code stays as it is.

`sigmascope watch script.py` starts Python anew with `bootstrap` on its path (`launch`); `SIGMASCOPE=1` does so through a
startup file (`startup_file`). Both call `process.start`, which waits for the first import of what can be watched.
Python's own startup runs this code: until then it loads nothing but small parts of the standard library.
"""
