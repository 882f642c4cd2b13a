"""The command line: a module for each command or two of one subject, which parses, calls and renders."""


def main() -> None:
    """Run `sigmascope` with the arguments of this process (the console script's entry point)."""
    import sys

    if sys.argv[1:] == ["--version"]:  # scripts ask for it again and again: before anything is imported
        from sigmascope.__about__ import __version__

        try:
            print(__version__, flush=True)  # noqa: T201 - Typer's echo takes most of a tenth of a second to import
        except OSError:
            pass  # which `run` tells
        else:
            return
    try:
        from sigmascope.cli.root import run

        run()
    except KeyboardInterrupt:  # before `run` could take care of it
        sys.stderr.write("Stopped by Ctrl-C.\n")
        sys.exit(_code_after_ctrl_c())
    except SystemExit as leaving:
        from sigmascope.errors import STOPPED_BY_USER

        if leaving.code == STOPPED_BY_USER:
            _code_after_ctrl_c()
        raise


def _code_after_ctrl_c() -> int:
    """The exit code, with which the process ends though Ctrl-C may come again while Python waits for its threads.

    Of a thread that is within one long call of a library it does not wait for the end.

    Python kills itself if Ctrl-C came while it executed text, as many modules have it do while they are imported. It
    remembers that until it executes text again.
    """
    import os
    import signal
    import sys
    from contextlib import suppress

    from sigmascope.errors import STOPPED_BY_USER

    signal.signal(signal.SIGINT, lambda number, frame: os._exit(STOPPED_BY_USER))
    exec("")
    parallel = sys.modules.get("sigmascope.lora.parallel")
    if parallel is not None and parallel.is_left_working():
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(STOPPED_BY_USER)
    return STOPPED_BY_USER
