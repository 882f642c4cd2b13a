"""The command line: a module for each command or two of one subject, which parses, calls and renders."""


def main() -> None:
    """Run `sigmascope` with the arguments of this process (the console script's entry point)."""
    import sys

    if sys.argv[1:] == ["--version"]:  # scripts ask for it again and again: before anything is imported
        from sigmascope.__about__ import __version__

        print(__version__)  # noqa: T201 - Typer's echo takes most of a tenth of a second to import
        return
    from sigmascope.cli.root import run

    run()
