"""A finding, a surface, an accelerator: one new file and one line elsewhere, tried on a copy of the package."""

import difflib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import sigmascope

PACKAGE = Path(sigmascope.__file__).parent
ROOT = Path(__file__).parents[1]
SHOW = """
import json, runpy, sys
from dataclasses import replace
from typer.testing import CliRunner
from sigmascope.analysis.diagnostics import diagnose
from sigmascope.cli.root import app
from sigmascope.records.run import Run, Stage
from sigmascope.records.serialization import save_run

def show(*flags):
    result = CliRunner().invoke(app, ["show", *flags])
    assert result.exit_code == 0, result.output
    return result.output

run = Run("id", "a run", "2026-01-01T00:00:00+00:00", 1.0, stages=(Stage("denoising", 0.0, 1.0),))
save_run(replace(run, findings=diagnose(run)), "run.json")
"""


class House:
    """A copy of the package, to which something is added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / "sigmascope"
        shutil.copytree(PACKAGE, self.package, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))

    def add(self, file: str, text: str, *, registry: str, line: tuple[str, str]) -> None:
        (self.package / file).write_text(dedent(text), encoding="utf-8")
        before, after = line
        listed = (self.package / registry).read_text(encoding="utf-8")
        assert listed.count(before) == 1
        (self.package / registry).write_text(listed.replace(before, after), encoding="utf-8")

    def new_files(self) -> list[str]:
        there = [path.relative_to(self.package) for path in self.package.rglob("*.py")]
        return [str(path) for path in there if not (PACKAGE / path).exists()]

    def lines_elsewhere(self) -> int:
        """How many lines of the files that were there are new or changed."""
        count = 0
        for path in self.package.rglob("*.py"):
            before = PACKAGE / path.relative_to(self.package)
            if before.exists() and before.read_bytes() != path.read_bytes():
                old, new = (file.read_text(encoding="utf-8").splitlines() for file in (before, path))
                count += sum(line.startswith("+ ") for line in difflib.ndiff(old, new))
        return count

    def run(self, code: str) -> Any:
        """What the code prints as JSON, run with the copy."""
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder), "COLUMNS": "200", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_a_finding_is_one_file_and_one_line(house: House) -> None:
    rule = '''
        """Rules that are made up."""

        from collections.abc import Iterator

        from sigmascope.analysis.generations import Case
        from sigmascope.analysis.rules import Seen, rule


        @rule("odd.number", "error", about="odd things")
        def odd_number(case: Case) -> Iterator[Seen]:
            """An odd number of stages."""
            if len(case.stages) % 2:
                yield Seen("The stages are odd.", {"stages": len(case.stages)}, "Add a stage.")
        '''
    line = ("    memory,\n", "    memory,\n    rules_odd,\n")
    house.add("analysis/rules_odd.py", rule, registry="analysis/diagnostics.py", line=line)
    assert (house.new_files(), house.lines_elsewhere()) == (["analysis/rules_odd.py"], 1)

    told = house.run(
        SHOW
        + f"""
flags = ([], ["--full"], ["--markdown"], ["--json"])
told = {{"".join(more) or "console": show("run.json", *more) for more in flags}}
for name in ("html", "trace"):
    show("run.json", f"--{{name}}", name)
    told[name] = open(name, encoding="utf-8").read()
told["docs"] = "\\n".join(runpy.run_path({str(ROOT / "scripts" / "pages.py")!r})["findings"]())
print(json.dumps(told))
"""
    )
    assert set(told) == {"console", "--full", "--markdown", "--json", "html", "trace", "docs"}
    docs = told.pop("docs")
    assert "| odd things | `odd.number` | error | An odd number of stages. |" in docs
    for place, text in told.items():
        assert "The stages are odd." in text, place
        assert "Add a stage." in text, place
    (finding,) = json.loads(told["--json"])[0]["findings"]
    assert (finding["id"], finding["severity"], finding["evidence"]) == ("odd.number", "error", {"stages": 1})


def test_a_surface_is_one_file_and_one_line(house: House) -> None:
    surface = '''
        """The names of stages."""

        from sigmascope.reports.surfaces import Surface


        def names(runs, prompts):
            return prompts + ": " + ", ".join(stage.name for run in runs for stage in run.walk())


        SURFACE = Surface("names", "Write the names of stages.", names, noun="list", is_private=True)
        '''
    line = ('    "trace",\n', '    "trace",\n    "names",\n')
    house.add("reports/names.py", surface, registry="reports/surfaces.py", line=line)
    assert (house.new_files(), house.lines_elsewhere()) == (["reports/names.py"], 1)

    told = house.run(
        SHOW
        + """
told = {"help": show("--help"), "said": show("run.json", "--names", "names.txt", "--prompts", "none")}
print(json.dumps(told))
"""
    )
    help_text = " ".join(told["help"].replace("│", " ").split())
    assert "--names" in help_text
    assert "Write the names of stages." in help_text
    assert "What --html, --markdown, --prometheus, --trace and --names show of prompts" in help_text
    assert told["said"] == "The list is in names.txt\n"
    written = house.folder / "names.txt"
    assert written.read_text(encoding="utf-8") == "none: denoising"
    assert written.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_an_accelerator_is_one_file_and_one_line(house: House) -> None:
    accelerator = '''
        """Gaudi, made up."""

        from types import SimpleNamespace

        from sigmascope.probes.accelerators.accelerator import CachingAccelerator
        from sigmascope.records.run import AcceleratorFacts

        MIB = 2**20
        BACKEND = SimpleNamespace(
            is_initialized=lambda: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            memory_stats_as_nested_dict=lambda index: {
                "allocated_bytes": {"all": {"current": 5 * MIB, "peak": 7 * MIB}},
                "reserved_bytes": {"all": {"current": 8 * MIB, "peak": 8 * MIB}},
            },
            reset_peak_memory_stats=lambda index: None,
            mem_get_info=lambda index: (90 * MIB, 100 * MIB),
        )


        class GaudiAccelerator(CachingAccelerator):
            def __init__(self):
                super().__init__("hpu", BACKEND)

            def facts(self, device):
                return AcceleratorFacts(device, "Gaudi 3", 100 * MIB, "1.2", "3")


        ACCELERATOR = GaudiAccelerator
        '''
    line = ('    "cuda",\n', '    "cuda",\n    "hpu",\n')
    house.add(
        "probes/accelerators/hpu.py", accelerator, registry="probes/accelerators/detection.py", line=line
    )
    assert (house.new_files(), house.lines_elsewhere()) == (["probes/accelerators/hpu.py"], 1)

    told = house.run(
        """
import json, torch
torch.accelerator.current_accelerator = lambda *_: torch.device("hpu")
from rich.console import Console
from typer.testing import CliRunner
from sigmascope import Recorder
from sigmascope.cli.root import app
from sigmascope.pipeline.optimization_plan import read_hardware
from sigmascope.records.serialization import run_to_json

with Recorder("made up") as recorder, recorder.stage("denoising"):
    pass
doctor = CliRunner().invoke(app, ["doctor", "--json"])
assert doctor.exit_code == 0, doctor.output
console = Console(record=True, width=120, file=open("printed", "w"))
recorder.run().print(console, full=True)
print(json.dumps({
    "record": json.loads(run_to_json(recorder.run()))["run"],
    "doctor": json.loads(doctor.stdout),
    "printed": console.export_text(),
    "plan": str(read_hardware()),
}))
"""
    )
    facts = {"device": "hpu:0", "name": "Gaudi 3", "total_bytes": 100 * 2**20}
    for place in (told["record"], told["doctor"]):
        (device,) = place["host"]["accelerators"]
        assert {name: device[name] for name in facts} == facts
    (peak,) = told["record"]["stages"][0]["peak"]["accelerators"]
    assert (peak["device"], peak["allocated_bytes"]) == ("hpu:0", 7 * 2**20)
    works = {entry["name"]: entry["works"] for entry in told["doctor"]["measurements"]}
    assert (works["memory of devices"], works["utilisation of the device"]) == (True, False)
    assert "hpu:0: Gaudi 3, 100.0 MiB" in told["printed"]
    assert told["plan"] == "hpu:0 (Gaudi 3), 100.0 MB"
