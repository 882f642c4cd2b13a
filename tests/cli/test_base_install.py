"""Commands where only the base is installed: each works, or says which extra it needs and how to add it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from sigmascope.lbm.pocket import BASE_PATH, TUNED_PATH

WITHOUT_EXTRAS = """
import json, sys, traceback
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

class Base:
    def __init__(self, finder, extras):
        self.finder, self.extras = finder, extras
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.extras:
            return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

extras, commands = json.loads(sys.argv[1])
sys.meta_path[:] = [Base(finder, extras) for finder in sys.meta_path]
from sigmascope.cli import main
ended = []
for words in commands:
    sys.argv = ["sigmascope", *words]
    code, said = 0, StringIO()
    with redirect_stdout(StringIO()), redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            code = "traceback"
            traceback.print_exc()
    ended.append((code, said.getvalue()))
print(json.dumps(ended))
"""
OF_EXTRAS = (
    "diffusers", "transformers", "peft", "accelerate", "webdataset", "tensorboard", "starlette", "uvicorn", "pynvml",
    "prometheus_client", "gguf", "scipy", "skimage", "matplotlib", "lycoris", "hypothesis", "pandas", "sklearn",
    "opentelemetry", "pyarrow",
)  # fmt: skip
"""What an extra brings, or tests; pydantic is not among them, since newer versions of Typer bring it."""


class Ended(NamedTuple):
    """How a command ended."""

    code: int | str
    said: str


def run(commands: list[list[object]], folder: Path) -> list[Ended]:
    words = [list(map(str, command)) for command in commands]
    script = [sys.executable, "-c", WITHOUT_EXTRAS, json.dumps([OF_EXTRAS, words])]
    done = subprocess.run(script, capture_output=True, text=True, check=True, cwd=folder)
    return [Ended(*ended) for ended in json.loads(done.stdout)]


@pytest.mark.slow
def test_what_needs_no_extra_works_without(tmp_path: Path) -> None:
    pair: list[object] = ["--base_model_path", BASE_PATH, "--tuned_model_path", TUNED_PATH]
    commands: list[list[object]] = [
        ["lora", "extract", *pair, "--save_to", "l.safetensors", "--rank", 2],
        ["lora", "validate", *pair, "--lora_path", "l.safetensors", "--picture", "v.png"],
        ["lora", "inspect", "l.safetensors", "--model", BASE_PATH],
        ["lora", "diff", "l.safetensors", "l.safetensors"],
        ["lora", "convert", "l.safetensors", "k.safetensors", "--format", "kohya"],
        ["doctor"],
        ["lora", "grid", "--help"],
    ]
    for command, ended in zip(commands, run(commands, tmp_path), strict=True):
        assert ended.code == 0, (command, ended.said)
    with Image.open(tmp_path / "v.png") as drawing:
        assert drawing.width > 100
    assert (tmp_path / "l.yaml").exists() or list(tmp_path.glob("l*.yaml"))


@pytest.mark.slow
def test_what_needs_an_extra_names_it_and_how_to_add_it(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "x.png")
    (tmp_path / "t.yaml").write_text("{}")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(60))
    (tmp_path / "l.safetensors").write_bytes(BASE_PATH.read_bytes())
    wanted: dict[str, list[list[object]]] = {
        "lbm": [
            ["demo"],
            ["bench", "pocket"],
            ["lora", "statistics", BASE_PATH, "--noise", 2, "--save_to", "st.safetensors"],
            ["lora", "grid", "pocket", "--lora", "l.safetensors", "--output", "g.png"],
            ["lbm", "infer", "--base_model_path", BASE_PATH, "--source_image", "x.png", "--output_path", "y.png"],
            ["lbm", "create-base", "--save_path", "b.safetensors", "--config_path", "t.yaml"],
        ],
        "ui": [["lbm", "serve", "--pocket"], ["ui"]],
        "train": [
            ["lbm", "train", "--path_config", "t.yaml"],
            ["lbm", "make-shards", ".", "shards"],
        ],
    }  # fmt: skip
    commands = [command for several in wanted.values() for command in several]
    extras = [extra for extra, several in wanted.items() for _ in several]
    for extra, command, ended in zip(extras, commands, run(commands, tmp_path), strict=True):
        assert ended.code == 2, (command, ended.said)
        assert re.search(
            rf"needs \w+, which is not installed.*pip install .*\[{extra}\]", ended.said, re.S
        ), (
            command,
            ended.said,
        )
