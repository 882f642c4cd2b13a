"""Options that messages and pages name are there, and spelled as the help spells them."""

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

import sigmascope
from sigmascope.cli.root import app

SOURCE = Path(sigmascope.__file__).parent
PAGES = Path(__file__).parents[3] / "docs"
PAGES_SCRIPT = Path(__file__).parents[3] / "scripts" / "pages.py"
NAMED = re.compile(r"(?<![\w-])--[a-z][\w-]*")
OTHERS = {
    "--use_fsdp", "--fsdp_version", "--use_deepspeed", "--zero_stage", "--deepspeed_config_file", "--use_megatron_lm",
}  # fmt: skip
"""Of `accelerate launch` and `torchrun`."""
CALL = re.compile(r"sigmascope ((?:[a-z-]+ )+)")


def commands(command: Any, *names: str) -> dict[str, Any]:
    """Every command by its words: `lbm train`."""
    if not isinstance(command, TyperGroup):
        return {" ".join(names): command}
    found: dict[str, Any] = {}
    for name, inner in command.commands.items():
        found |= commands(inner, *names, name)
    return found


COMMANDS = commands(typer.main.get_command(app))


def options(command: Any) -> set[str]:
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)}


def test_options_that_messages_name_are_in_the_help() -> None:
    known = OTHERS.union(*map(options, COMMANDS.values()))
    wrong = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {name}"
        for folder in (SOURCE / "lbm", SOURCE / "cli" / "lbm")
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in NAMED.findall(node.value)
        if name not in known
    ]
    assert wrong == []


@pytest.mark.parametrize("page", sorted(PAGES.glob("lbm*.md")), ids=lambda page: page.stem)
def test_commands_of_a_page_have_the_options_that_it_gives_them(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    wrong = []
    for line in text.splitlines():
        for match in CALL.finditer(line):
            command = COMMANDS.get(match[1].strip())
            given = NAMED.findall(re.split(r"`|[|#&]", line[match.end() :])[0])
            if command is not None:
                wrong += [f"{match[0]}{name}" for name in given if name not in options(command)]
    assert wrong == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_argument_and_option_of_a_command_has_its_help(name: str) -> None:
    untold = [param.name for param in COMMANDS[name].params if not param.help]
    assert untold == []


def test_the_page_of_commands_lists_every_option() -> None:
    page = "\n".join(runpy.run_path(str(PAGES_SCRIPT))["commands"]())
    for name, command in COMMANDS.items():
        section = re.split(r"^#{2,} `", page.partition(f"`sigmascope {name}`\n")[2], flags=re.MULTILINE)[0]
        missing = {option for option in options(command) if option.startswith("--") and option not in section}
        assert missing - {"--help"} == set(), name


YAMLS = {
    name: spelt
    for name, command in COMMANDS.items()
    for spelt in options(command) & {"--config_path", "--path_config"}
}


def test_each_command_shows_one_name_for_its_yaml() -> None:
    assert {name for name in YAMLS if name.startswith("lbm ")} == {
        "lbm create-base", "lbm infer", "lbm serve", "lbm train",
    }  # fmt: skip
    assert not any({"--config_path", "--path_config"} <= options(command) for command in COMMANDS.values())


@pytest.mark.parametrize("spelt", ["--config_path", "--path_config", "--config-path", "--path-config"])
@pytest.mark.parametrize("name", sorted(YAMLS))
def test_both_names_of_a_yaml_s_option_work_everywhere(name: str, spelt: str) -> None:
    """`a.yaml` is taken, and what is missing is something else."""
    outcome = CliRunner().invoke(app, [*name.split(), spelt, "a.yaml", "--no_such_option"])
    assert outcome.exit_code == 2
    assert "--no_such_option" in outcome.stderr.replace("-no-such-option", "-no_such_option")
    assert "config" not in outcome.stderr.replace("'--path_config'", "")


def test_what_takes_a_model_takes_its_name_on_the_hub() -> None:
    """Of every command; a grid loads pipelines diffusers' own way, and kept runs are looked for by a part of the name."""
    models = re.compile(r"--(base|tuned)_model_path|--model|--into|BASE|TUNED|MODEL")
    taking = {
        f"{name} {param.opts[0]}": getattr(param, "callback", None) is not None
        for name, command in COMMANDS.items()
        for param in command.params
        if models.fullmatch(param.opts[0]) or (param.metavar and models.fullmatch(param.metavar))
    }
    without = {where for where, has in taking.items() if not has}
    assert without == {"lora grid model", "runs list --model", "runs export --model", "trend --model"}
    assert len(taking) > 12
