"""Whatever a file says or is called: each command ends without acting on the terminal, in any encoding.

As was reported of others: Click repeats what was typed (pallets/click#3832), names in a GGUF file reach the terminal
(ggml-org/llama.cpp#28969), a bar fails on cp1252 (Aider-AI/aider#1408).
"""

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from tests.chaos.made_files import make_specimens
from tests.reports.console.test_harmless import TOLD, poisoned
from typer.main import get_command

import sigmascope
from sigmascope.cli import root
from sigmascope.history.location import STORE
from sigmascope.history.store import open_store
from sigmascope.records.serialization import load_run, run_to_json

EVIL = "a\x1b]0;x\x07\x9b31m\u202eb[/bold]\u732b✓"
"""A terminal's title, a colour, a turned direction, markup, and characters that most encodings lack."""
NAME = f"{EVIL}\udcff".replace("/", "")
"""Of files: also with a byte that is no character."""
ENCODINGS = ("utf-8", "cp1252", "latin-1", "ascii")

EXITS = (
    "show RUN", "show RUN --full", "show RUN --markdown", "show RUN --json", "show RUN --html OUT", "show RUN --trace OUT",
    "show RUN RUN2 --markdown", "show NONE", "show FOLDER", "show RUN --prompts EVIL", "show RUN --EVIL",
    "compare RUN RUN2 --full --by_step", "compare RUN RUN", "check RUN --baseline RUN2", "check RUN --baseline NONE",
    "compare-tensors DUMP DUMP2", "compare-tensors DUMP NONE", "bench NONE", "watch NONE", "watch --output NONE/x x.py", "doctor",
    "comfyui install NONE", "comfyui status FOLDER", "comfyui uninstall EVIL",
    "demo --source_image NONE", "lora inspect LORA --verbose", "lora inspect LORA --model BASE", "lora inspect LORA --json",
    "lora inspect NONE", "lora inspect GGUF", "lora inspect LORA --model GGUF", "lora diff LORA LORA2 --verbose", "lora plan BASE TUNED",
    "lora extract --base_model_path BASE --tuned_model_path TUNED --save_to OUT --rank 2 --workers 1",
    "lora extract --base_model_path BASE --tuned_model_path NONE --save_to OUT --rank 2",
    "lora validate --base_model_path BASE --tuned_model_path TUNED --lora_path LORA --workers 1 --verbose",
    "lora convert LORA OUT --format kohya", "lora resize LORA OUT --rank 1", "lora merge LORA LORA2 --save_to OUT --rank 2",
    "lora merge LORA --into BASE --save_to OUT", "lora merge LORA --EVIL", "lora statistics NONE --save_to OUT",
    "lora fit LORA --base_model_path BASE --tuned_model_path NONE --save_to OUT", "lora grid NONE --lora LORA",
    "lbm create-base --config_path YAML --save_path OUT", "lbm create-base --config_path NONE --save_path OUT",
    "lbm infer --base_model_path NONE --source_image NONE --output_path PICTURE", "lbm make-shards FOLDER NONE",
    "lbm serve --base_model_path NONE", "lbm train --path_config YAML --dry_run", "lbm train --path_config NONE",
    "runs list", "runs list --json", "runs list --pipeline EVIL", "runs list --tag EVIL", "runs show latest", "runs show EVIL", "runs tag EVIL latest",
    "runs note latest EVIL", "runs rm latest", "runs prune --most 0", "runs export out.jsonl", "runs export out.csv --table stages", "runs export EVIL", "runs merge RUN RUN2 --output OUT",
    "runs merge RUN RUN --output OUT", "show RUN --prometheus OUT", "runs import RUN2", "runs import NONE",
    "runs query SELECT(id)FROM(runs)", "runs query SELECT(note)FROM(notes)", "runs query EVIL", "ui --host EVIL", "ui --prompts EVIL", "show latest", "compare", "compare latest EVIL", "runs EVIL",
    "trend", "trend latest --json", "trend --markdown", "trend --html OUT", "trend EVIL", "trend --figure EVIL", "check latest --against-history", "check RUN --against-history --markdown",
    "EVIL", "lora EVIL", "lora inspect LORA EVIL",
)  # fmt: skip
"""Command lines, ending well or not; capitals stand for files whose names and content are evil."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files that the chaos damages, with evil names in them and around them."""
    folder = tmp_path_factory.mktemp("evil")
    sound = {f"{each.family} {each.file}": each.folder for each in reversed(make_specimens(folder / "sound"))}
    evil = folder / NAME
    evil.mkdir()
    made = {"NONE": evil / NAME, "FOLDER": evil, "GGUF": evil / f"GGUF{NAME}.gguf"}

    def weights(name: str, source: Path, twin: str) -> None:
        """The file with one layer twice, under an evil name too."""
        state = load_file(source)
        state |= {key.replace(twin, EVIL): value.clone() for key, value in state.items() if twin in key}
        made[name] = evil / f"{name}{NAME}.safetensors"
        save_file(state, folder / "evil.safetensors", {"ss_output_name": EVIL, EVIL: EVIL})
        (folder / "evil.safetensors").rename(made[name])  # safetensors writes to no such name

    layer = "denoiser.time_embedding.linear_1"
    for name in ("LORA", "LORA2"):
        weights(name, sound["lora in.safetensors"] / "in.safetensors", layer)
    for name in ("BASE", "TUNED"):
        weights(name, sound["weights in.safetensors"] / f"{name.lower()}.safetensors", layer)
    for name in ("RUN", "RUN2"):
        made[name] = evil / f"{name}{NAME}.json"
        plain = poisoned(json.loads(run_to_json(replace(TOLD, id=name))))
        made[name].write_text(json.dumps(plain), encoding="utf-8")
    for name in ("DUMP", "DUMP2"):
        made[name] = evil / f"{name}{NAME}.safetensors"
        sigmascope.save_tensors(made[name], {EVIL: torch.full((2,), float(len(name)))}, note=EVIL)
    writer = gguf.GGUFWriter(made["GGUF"], EVIL)
    writer.add_string(EVIL, EVIL)
    writer.add_tensor(f"{EVIL}.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made["STORE"] = evil / "runs.db"
    with open_store(f"sqlite:///{made['STORE']}") as store:
        store.add(load_run(made["RUN"]), EVIL, tags=["told"], notes=[EVIL])
    made["YAML"] = evil / f"YAML{NAME}.yaml"
    config = (sound["config in.yaml"] / "in.yaml").read_text(encoding="utf-8")
    made["YAML"].write_text(f"{json.dumps(EVIL)}: {json.dumps(EVIL)}\n{config}", encoding="utf-8")
    return {name: str(path) for name, path in made.items()}


def ended(line: Sequence[str], encoding: str) -> tuple[int, str]:
    """The exit code and what is written, read in the encoding."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict") for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sigmascope", *line])
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        with pytest.raises(SystemExit) as leaving:
            root.run()
        for stream in streams:
            stream.flush()
    code = leaving.value.code or 0
    assert isinstance(code, int)
    return code, "".join(stream.buffer.getvalue().decode(encoding) for stream in streams)


@pytest.mark.parametrize("line", EXITS)
def test_nothing_acts_on_the_terminal_and_no_encoding_fails(
    line: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(files["STORE"], tmp_path / "runs.db")
    monkeypatch.setenv(STORE, str(tmp_path / "runs.db"))
    encoding = ENCODINGS[EXITS.index(line) % len(ENCODINGS)]
    known = {
        **files,
        "OUT": f"out{NAME}.safetensors",
        "PICTURE": f"{NAME}.png",
        "EVIL": EVIL,
        "--EVIL": f"--{EVIL}",
    }
    code, said = ended([known.get(word, word) for word in line.split()], encoding)
    assert code in (0, 1, 2)
    assert "Traceback" not in said
    assert said
    assert {char for char in said if not (char.isprintable() or char == "\n")} == set()


def test_every_command_is_tried() -> None:
    def commands(command: Any, name: str = "") -> Iterator[str]:
        if not hasattr(command, "list_commands"):
            yield name.strip()
            return
        context = typer.Context(command)
        for inner in command.list_commands(context):
            yield from commands(command.get_command(context, inner), f"{name} {inner}")

    tried = [f"{line} " for line in EXITS]
    assert [
        name
        for name in commands(get_command(root.app))
        if not any(line.startswith(f"{name} ") for line in tried)
    ] == []


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_an_encoding_lacks_has_a_plain_mark(
    encoding: str, files: dict[str, str], tmp_path: Path
) -> None:
    _, shown = ended(["show", files["RUN"], "--full"], encoding)
    assert ("✗" if encoding == "utf-8" else "x") + " " in shown
    _, inspected = ended(["lora", "inspect", files["LORA"], "--verbose"], encoding)
    strength = {"utf-8": "Strength ‖ΔW‖"}.get(encoding, "Strength |dW|")
    assert strength in inspected
    assert ("\u732b" if encoding == "utf-8" else "\\u732b") in inspected
    named = tmp_path / "named.json"
    named.write_text(run_to_json(replace(TOLD, name="\u732b")), encoding="utf-8")
    _, for_tracker = ended(["show", str(named), "--markdown"], encoding)
    assert ("\u732b" if encoding == "utf-8" else "\\u732b") in for_tracker


def test_commands_print_with_the_console_that_is_safe() -> None:
    folder = Path(root.__file__).parent
    unsafe = [
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if re.search(r"from rich.console import .*\bConsole\b", path.read_text(encoding="utf-8"))
    ]
    assert unsafe == ["console.py"]
