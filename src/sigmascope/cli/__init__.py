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
    from sigmascope.cli.root import run

    run()
