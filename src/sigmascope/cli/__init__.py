"""The command line: one module for each command, which parses, calls and renders."""


def main() -> None:
    """Run `sigmascope` with the arguments of this process (the console script's entry point)."""
    from sigmascope.cli.root import run

    run()
