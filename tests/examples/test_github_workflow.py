"""The workflow for GitHub Actions: its form, and its commands run one after another as a runner runs them."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from sigmascope.records.run import Run
from sigmascope.records.serialization import load_run

WORKFLOW = Path(__file__).parents[2] / "examples" / "github" / "performance.yml"
TEXTS = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
STEP = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        **{name: {"type": "string"} for name in ("id", "if", "name", "run", "shell", "working-directory")},
        "uses": {"type": "string", "pattern": r"^[\w.-]+(/[\w.-]+)+@[\w.-]+$"},
        "with": TEXTS,
        "env": TEXTS,
        "continue-on-error": {"type": ["boolean", "string"]},
        "timeout-minutes": {"type": ["number", "string"]},
    },
    "oneOf": [{"required": ["uses"]}, {"required": ["run"]}],
    "dependentRequired": {"with": ["uses"], "shell": ["run"]},
}
JOB = {
    "type": "object",
    "additionalProperties": False,
    "required": ["runs-on", "steps"],
    "properties": {
        "name": {"type": "string"},
        "runs-on": {"type": ["string", "array"], "items": {"type": "string"}, "minItems": 1},
        "needs": {"type": ["string", "array"]},
        "if": {"type": "string"},
        "env": TEXTS,
        "permissions": TEXTS,
        "timeout-minutes": {"type": ["number", "string"]},
        "steps": {"type": "array", "minItems": 1, "items": STEP},
    },
}
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["on", "jobs"],
    "properties": {
        "name": {"type": "string"},
        "on": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                name: {"type": ["object", "null"]} for name in ("push", "pull_request", "workflow_dispatch")
            },
        },
        "permissions": {
            "type": "object",
            "propertyNames": {"enum": ["contents", "pull-requests", "issues", "actions", "checks"]},
            "additionalProperties": {"enum": ["read", "write", "none"]},
        },
        "env": TEXTS,
        "jobs": {
            "type": "object",
            "minProperties": 1,
            "propertyNames": {"pattern": r"^[A-Za-z_][\w-]*$"},
            "additionalProperties": JOB,
        },
    },
}
"""What of GitHub's workflow syntax the example uses; a key that is not here is misspelt, or to be added."""


SCRIPT = """
import time
import sigmascope
with sigmascope.stage("drawing"):
    time.sleep({})
"""


def workflow() -> dict[str, Any]:
    read = yaml.load(WORKFLOW.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # "on" is no boolean
    return {name: value or None for name, value in read.items()}


def steps() -> dict[str, dict[str, Any]]:
    return {step.get("name", step.get("uses")): step for step in workflow()["jobs"]["performance"]["steps"]}


def test_it_has_the_form_of_a_workflow() -> None:
    read = workflow()
    read["on"]["pull_request"] = read["on"]["pull_request"] or None
    jsonschema.validate(read, SCHEMA)


@pytest.mark.parametrize("wrong", [{"runs_on": "ubuntu"}, {"steps": [{"name": "nothing"}]}])
def test_the_form_refuses_what_github_refuses(wrong: dict[str, Any]) -> None:
    read = workflow()
    job = {**read["jobs"]["performance"], **wrong}
    read["on"]["pull_request"] = None
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**read, "jobs": {"performance": job}}, SCHEMA)


def test_what_a_step_asks_of_another_is_there() -> None:
    ids = [step["id"] for step in steps().values() if "id" in step]
    text = WORKFLOW.read_text(encoding="utf-8")
    asked = {part.split(".")[0] for part in text.split("steps.")[1:]}
    assert asked == set(ids)
    caches = [step["with"] for step in steps().values() if "actions/cache" in step.get("uses", "")]
    assert caches[0]["key"] == caches[1]["key"]
    assert caches[0]["key"].startswith(caches[0]["restore-keys"])


def quiet(run: Run, name: str, started_at: str, seconds: float) -> Run:
    """The run without what the machine of this test did to its time."""
    stages = tuple(replace(stage, facts={}) for stage in run.stages if stage.name == "drawing")
    return replace(run, id=name, started_at=started_at, seconds=seconds, facts={}, stages=stages)


@pytest.mark.slow
def test_its_commands_keep_a_history_and_fail_a_pull_request(tmp_path: Path) -> None:
    """A push to main, then a pull request as fast, then one whose runs take a fifth longer."""
    (tmp_path / "bin").mkdir()
    shim = tmp_path / "bin" / "sigmascope"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sigmascope "$@"\n', encoding="utf-8")
    shim.chmod(0o755)
    script = tmp_path / "generate.py"
    summary, output = tmp_path / "summary.md", tmp_path / "output"
    environment = {
        **os.environ,
        "PATH": f"{shim.parent}:{os.environ['PATH']}",
        "SIGMASCOPE_STORE": str(tmp_path / ".sigmascope" / "runs.db"),
        "GITHUB_STEP_SUMMARY": str(summary),
        "GITHUB_OUTPUT": str(output),
    }

    def run(name: str, **more: str) -> int:
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", steps()[name]["run"]]
        return subprocess.run(command, cwd=tmp_path, env={**environment, **more}, check=False).returncode

    def checked() -> int:
        output.write_text("", encoding="utf-8")
        assert run("Check") == 0
        return run("Fail on a regression", CODE=output.read_text().strip().removeprefix("code="))

    script.write_text(SCRIPT.format(0.5), encoding="utf-8")
    assert run("Measure") == 0
    files = sorted((tmp_path / "new").glob("*.json"))
    assert len(files) == 5
    runs = [load_run(file) for file in files]
    shutil.rmtree(tmp_path / "new")
    (tmp_path / "new").mkdir()
    for number, made in enumerate(runs * 2):  # what main made on two days before, on a quiet machine
        day = f"2026-01-0{1 + number // 5}T12:0{number % 5}:00+00:00"
        quiet(made, f"{number:032x}", day, 10 + number / 100).save(tmp_path / "new" / f"{number}.json")
    assert run("Add to the history") == 0
    assert "no change point in 10 runs" in summary.read_text(encoding="utf-8")
    shutil.rmtree(tmp_path / "new")
    (tmp_path / "new").mkdir()
    for seconds, code in ((10.0, 0), (12.0, 1)):
        for number, made in enumerate(runs):
            day = f"2026-02-01T12:0{number}:00+00:00"
            same = quiet(made, f"{100 + number:032x}", day, seconds + number / 90)
            same.save(tmp_path / "new" / f"{number}.json")
        assert checked() == code
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert report.startswith("**1 figure regressed.")
    assert "| total |" in report
    assert summary.read_text(encoding="utf-8").endswith(report)
