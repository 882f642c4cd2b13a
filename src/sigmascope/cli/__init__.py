"""The command line: a module for each command or two of one subject, which parses, calls and renders."""


def main() -> None:
    """Run `sigmascope` with the arguments of this process (the console script's entry point)."""
    from sigmascope.cli.root import run

    run()
