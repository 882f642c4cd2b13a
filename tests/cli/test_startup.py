"""What the first answers of the command line import, and that the list of commands says what the commands say."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from sigmascope.__about__ import __version__
from sigmascope.cli.root import app

ASK = """
import json, sys
from sigmascope.cli import main
sys.argv = ["sigmascope", *json.loads(sys.argv[1])]
try:
    main()
except SystemExit as end:
    assert not end.code
print(json.dumps(sorted(sys.modules)))
"""
LIGHT = {"", ".__about__", ".cli", ".cli.root", ".cli.groups", ".errors", ".plain_text"}


def modules_after(*words: str) -> tuple[str, set[str]]:
    script = [sys.executable, "-c", ASK, json.dumps(words)]
    done = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    *said, names = done.splitlines()
    return "\n".join(said), set(json.loads(names))


def ours(modules: set[str]) -> set[str]:
    return {name.removeprefix("sigmascope") for name in modules if name.partition(".")[0] == "sigmascope"}


def test_the_version_is_said_before_typer_is_imported() -> None:
    said, modules = modules_after("--version")
    assert said == __version__
    assert ours(modules) == {"", ".__about__", ".cli"}
    assert not modules & {"typer", "rich", "click", "dataclasses", "inspect"}


@pytest.mark.parametrize(
    ("words", "more"), [((), set()), (("lora",), {".cli.lora"}), (("lbm",), {".cli.lbm"})]
)
def test_help_imports_no_command(words: tuple[str, ...], more: set[str]) -> None:
    said, modules = modules_after(*words, "--help")
    assert "Commands" in said
    assert ours(modules) <= LIGHT | more
    assert not modules & {"psutil", "cattrs", "jinja2", "numpy", "torch", "rich.progress"}


def test_the_version_is_said_beside_other_options() -> None:
    assert modules_after("--version", "lora")[0] == __version__


def groups(group: Any, *names: str) -> list[tuple[str, TyperGroup]]:
    found = [(" ".join(names), group)]
    for name, inner in group.commands.items():
        if isinstance(inner, TyperGroup):
            found += groups(inner, *names, name)
    return found


@pytest.mark.parametrize(("name", "group"), groups(typer.main.get_command(app), "sigmascope"))
def test_a_list_says_of_each_command_what_its_own_help_says_first(name: str, group: Any) -> None:
    with group._summaries_alone():
        listed = {command: group.commands[command].help for command in group.commands}
    assert listed == {
        command: whole.help.partition("\n\n")[0].replace("\n", " ")
        for command, whole in group.commands.items()
    }


@pytest.mark.parametrize(("words", "incomplete", "found"), [
    ("sigmascope", "d", ["doctor", "demo"]),
    ("sigmascope lora", "re", ["resize"]),
    ("sigmascope lora resize", "--ran", ["--rank", "--rank_for", "--rank_method"]),
])  # fmt: skip
def test_a_shell_completes_commands_and_options(words: str, incomplete: str, found: list[str]) -> None:
    environment = {
        "_SIGMASCOPE_COMPLETE": "complete_zsh",
        "_TYPER_COMPLETE_ARGS": f"{words} {incomplete}",
    }
    script = "import sys; sys.argv = ['sigmascope']; from sigmascope.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert [word for word in found if f'"{word}"' not in done.stdout] == [], done.stdout + done.stderr
