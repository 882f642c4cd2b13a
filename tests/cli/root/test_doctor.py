import json

import torch
from typer.testing import CliRunner

from sigmascope.cli.root import app


def test_it_tells_versions_devices_measurements_and_extras() -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert torch.__version__ in done.output
    for heading in ("Machine", "Devices", "Measured", "Extras"):
        assert heading in done.output


def test_json_holds_all_of_it() -> None:
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert found["torch"]["version"] == torch.__version__
    assert {"host", "memory", "measurements", "extras", "settings", "advice"} <= set(found)
    assert all(isinstance(one["works"], bool) and one["reason"] for one in found["measurements"])
