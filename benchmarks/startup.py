"""How long the first answers of the command line take: `--version` beside bare Python, `--help` beside an empty Typer."""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import typer

from sigmascope.cli.root import app

MOST_VERSION, MOST_HELP = 4.0, 1.3
"""Of bare Python and of the empty application."""


def empty_application(commands: int) -> str:
    """The code of a Typer application whose commands do nothing."""
    lines = ["import typer", "app = typer.Typer(no_args_is_help=True, rich_markup_mode='rich')"]
    for index in range(commands):
        lines += [f"@app.command('command-{index}')", f"def command_{index}() -> None:", "    'Do nothing.'"]
    return "\n".join([*lines, "app()"])


def seconds(command: list[str]) -> float:
    """Of one process, from its start to its end."""
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    """Print the medians, taken in turns, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="Processes of each kind.")
    rounds = parser.parse_args().rounds
    commands = len(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # a group has them
    with tempfile.TemporaryDirectory() as folder:
        peer = Path(folder, "empty.py")
        peer.write_text(empty_application(commands), encoding="utf-8")
        python = sys.executable
        cases = {
            "bare Python": [python, "-c", "pass"],
            "--version": [python, "-m", "sigmascope", "--version"],
            "empty Typer --help": [python, str(peer), "--help"],
            "--help": [python, "-m", "sigmascope", "--help"],
        }
        taken: dict[str, list[float]] = {name: [] for name in cases}
        for turn in range(rounds + 1):
            for name, command in cases.items():
                spent = seconds(command)
                if turn:  # the first writes bytecode
                    taken[name].append(spent)
    medians = {name: median(values) for name, values in taken.items()}
    for name, value in medians.items():
        print(f"{name:20} {value * 1000:6.1f} ms")
    for name, peer_name, most in (
        ("--version", "bare Python", MOST_VERSION),
        ("--help", "empty Typer --help", MOST_HELP),
    ):
        print(f"{name} takes {medians[name] / medians[peer_name]:.2f} of {peer_name} (at most {most:g})")


if __name__ == "__main__":
    main()
