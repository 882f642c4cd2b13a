import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sigmascope.cli.console import needs_extra
from sigmascope.cli.lbm import app
from sigmascope.cli.lbm.infer import infer
from sigmascope.errors import ConfigError

# Those on the way to each package; they fail to import, so nothing of them stays.
IMPORTERS = ("lbm.images", "lbm.watched", "lbm.model", "lbm.config", "lbm.architecture")


@pytest.mark.parametrize("package", ["diffusers", "pydantic"])
def test_core_install_is_told_which_extra_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in IMPORTERS:
        monkeypatch.delitem(sys.modules, f"sigmascope.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as caught:  # without the parser: typer has uses of its own for pydantic
        infer(base_model_path=Path("base.ckpt"), source_image=Path("in.png"), output_path=Path("out.png"))
    assert package in caught.value.message
    assert caught.value.hint is not None
    assert "pip install -e " in caught.value.hint
    assert "[lbm]" in caught.value.hint


def test_help_needs_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("diffusers", "PIL", "yaml"):  # newer versions of typer bring pydantic themselves
        monkeypatch.setitem(sys.modules, package, None)
    assert CliRunner().invoke(app, ["infer", "--help"]).exit_code == 0


@pytest.mark.parametrize("name", ["torch", "sigmascope.nothing"])
def test_another_missing_module_is_no_matter_of_extras(name: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught, needs_extra("lbm"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    assert caught.value.name == name
