"""The command line. Each module here is one group of commands: parse, call, render."""


def main() -> None:
    """Run `sigmascope` with the arguments of this process (the console script's entry point)."""
    from sigmascope.cli.root import run

    run()
