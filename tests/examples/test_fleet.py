"""The fleet of `examples/fleet`, without containers: two servers of two workers, Prometheus, PostgreSQL, the dashboard."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.history.postgres import PROGRAMS, postgres_server
from tests.reports.metrics.receivers import until
from tests.reports.metrics.test_prometheus import samples, value

FLEET = Path(__file__).parents[2] / "examples" / "fleet"
DASHBOARD = json.loads((FLEET / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
EACH = 20
"""Requests for pictures that each server gets; of other kinds it gets one."""
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed (Debian: apt-get install prometheus)",
)


def queries() -> list[tuple[str, str]]:
    """The title of each panel, and a query of it."""
    return [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_what_we_export() -> None:
    asked = {name for _, query in queries() for name in re.findall(r"sigmascope_[a-z_]+", query)}
    page = (FLEET.parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
    served = set(re.findall(r"^\| `(sigmascope_\w+)`", page, re.MULTILINE))
    rules = {
        re.sub(":.*", "", name)
        for name in re.findall(r"sigmascope_[a-z_]+:", (FLEET / "rules.yml").read_text())
    }
    kinds = ("_bucket", "_sum", "_count")
    bare = {next((name.removesuffix(kind) for kind in kinds if name.endswith(kind)), name) for name in asked}
    assert bare - rules <= served
    assert len(bare) > 6


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def test_what_the_compose_file_names_is_there() -> None:
    compose = yaml.safe_load((FLEET / "compose.yaml").read_text(encoding="utf-8"))
    mounted = [
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", ())
        if volume.startswith("./")
    ]
    assert len(mounted) == 5
    for path in mounted:
        assert (FLEET / path).is_file(), path
    assert (
        FLEET / compose["x-server"]["build"]["context"] / compose["x-server"]["build"]["dockerfile"]
    ).is_file()
    scraped = yaml.safe_load((FLEET / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    targets = [
        target for config in scraped for static in config["static_configs"] for target in static["targets"]
    ]
    assert {target.split(":")[0] for target in targets} <= set(compose["services"])


@pytest.mark.slow
@needs_prometheus
def test_promtool_takes_the_rules_and_each_alert_fires_when_it_should(tmp_path: Path) -> None:
    for name in ("rules.yml", "rules_test.yml", "prometheus.yml"):
        shutil.copy(FLEET / name, tmp_path / name)
    for command in ("check rules rules.yml", "check config prometheus.yml", "test rules rules_test.yml"):
        done = subprocess.run(
            ["promtool", *command.split()], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    rules = (tmp_path / "rules.yml").read_text(encoding="utf-8")
    alerts = set(re.findall(r"alert: (\w+)", rules))
    assert alerts == set(
        re.findall(r"alertname: (\w+)", (tmp_path / "rules_test.yml").read_text(encoding="utf-8"))
    )
    for was, becomes in (
        ("> 1.3 *", "> 1.6 *"),
        ("> 30\n", "> 90\n"),
        ('outcome="oom"', 'outcome="oops"'),
        ("0.95\n", "0.99\n"),
    ):
        assert was in rules
        (tmp_path / "rules.yml").write_text(rules.replace(was, becomes), encoding="utf-8")
        tried = subprocess.run(
            ["promtool", "test", "rules", "rules_test.yml"], cwd=tmp_path, capture_output=True, check=False
        )
        assert tried.returncode != 0, f"with {becomes} they pass too"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def asked(url: str, *, fails: bool = False) -> str:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            text: str = response.read().decode()
            return text
    except urllib.error.HTTPError:
        if not fails:
            raise
        return ""


def answers(url: str) -> bool:
    try:
        asked(url)
    except OSError:
        return False
    return True


@contextmanager
def running(command: Sequence[object], folder: Path, name: str, **environment: str) -> Iterator[None]:
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            list(map(str, command)), cwd=folder, stdout=log, stderr=log, env={**os.environ, **environment}
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def server(folder: Path, name: str, store: str) -> Iterator[int]:
    """uvicorn with two workers that count into one folder; its port."""
    port, metrics = free_port(), folder / f"{name}-metrics"
    metrics.mkdir()
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "--port",
        port,
        "--workers",
        2,
        "tests.examples.fleet_app:app",
    ]
    kept = {"SIGMASCOPE_STORE": store, "SIGMASCOPE_KEEP": "1", "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    with running(command, folder, name, PYTHONPATH=path, **kept):
        until(lambda: answers(f"http://127.0.0.1:{port}/style"), 120)
        until(lambda: len(list(metrics.glob("counter_*.db"))) == 2, 60)  # both workers are there
        yield port


def asked_prometheus(port: int, query: str) -> list[Any]:
    words = urllib.parse.urlencode({"query": query})
    answer = json.loads(asked(f"http://127.0.0.1:{port}/api/v1/query?{words}"))
    assert answer["status"] == "success", answer
    found: list[Any] = answer["data"]["result"]
    return found


def in_full(query: str) -> str:
    """A query with what Grafana puts in the place of its variables."""
    return query.replace("$__rate_interval", "1m").replace("$pipeline", ".*")


def until_or_not(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for something at most so long; whoever asks next says what it is like then."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.5)


def yesterday(folder: Path) -> None:
    """Give Prometheus what a rule would have recorded a day ago."""
    now = time.time()
    lines = ["# TYPE pipeline:sigmascope_generation_seconds:mean30m gauge"]
    lines += [
        f'pipeline:sigmascope_generation_seconds:mean30m{{pipeline="pocket"}} 2 {now - 86400 + at:.3f}'
        for at in range(-3600, 3600, 60)
    ]
    (folder / "yesterday.txt").write_text("\n".join([*lines, "# EOF", ""]))
    command = [
        "promtool",
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        folder / "yesterday.txt",
        folder / "data",
    ]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)


@contextmanager
def prometheus(folder: Path, *targets: int) -> Iterator[int]:
    config = yaml.safe_load((FLEET / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in targets]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    rules = (FLEET / "rules.yml").read_text(encoding="utf-8")
    (folder / "rules.yml").write_text(rules.replace("interval: 30s", "interval: 1s"), encoding="utf-8")
    yesterday(folder)
    port = free_port()
    command = [
        "prometheus", "--config.file=prometheus.yml", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with running(command, folder, "prometheus"):
        until(lambda: answers(f"http://127.0.0.1:{port}/-/ready"), 60)
        yield port


@pytest.mark.slow
@pytest.mark.postgres
@needs_prometheus
@pytest.mark.skipif(not (PROGRAMS / "initdb").exists(), reason="PostgreSQL is not installed")
def test_two_servers_of_two_workers_are_counted_right_and_every_panel_has_data(tmp_path: Path) -> None:
    with ExitStack() as stack:
        store = f"postgresql+psycopg://me@/postgres?host={stack.enter_context(postgres_server())}"
        ports = [stack.enter_context(server(tmp_path, name, store)) for name in ("one", "two")]
        source = stack.enter_context(prometheus(tmp_path, *ports))
        time.sleep(2.5)  # two scrapes see each series before it grows
        for port in ports:
            for number in range(EACH):
                asked(f"http://127.0.0.1:{port}/draw/fox-{number}")
            asked(f"http://127.0.0.1:{port}/fail", fails=True)
            asked(f"http://127.0.0.1:{port}/style")
        for port in ports:
            read = [samples(asked(f"http://127.0.0.1:{port}/metrics")) for _ in range(6)]
            for told in read:  # whichever of the workers answers
                of = {"pipeline": "pocket"}
                drawn = value(told, "generations_total", **of, outcome="ok", route="/draw/{prompt}")
                assert drawn == EACH
                assert value(told, "generations_total", **of, outcome="oom", route="/fail") == 1
                assert value(told, "step_seconds_count", **of) == 3 * EACH + 3 * (
                    value(told, "requests_total", method="GET", status="200", route="/style") or 0
                )
                assert (
                    value(told, "requests_total", method="GET", status="200", route="/draw/{prompt}") == EACH
                )
                assert value(told, "requests_in_flight") == 0
            assert "fox" not in str(read)
        total = 'sum(sigmascope_generations_total{outcome="ok",route="/draw/{prompt}"})'
        until(lambda: [row["value"][1] for row in asked_prometheus(source, total)] == [str(2 * EACH)], 30)

        def empty() -> list[tuple[str, str]]:
            """Queries that give nothing, or no number."""
            return [
                (title, query)
                for title, query in queries()
                if not [row for row in asked_prometheus(source, in_full(query)) if row["value"][1] != "NaN"]
            ]

        again = 0

        def are_full() -> bool:
            """After more requests: Prometheus has no rate of a series that was whole when it first saw it."""
            nonlocal again
            again += 1
            for port in ports:
                asked(f"http://127.0.0.1:{port}/draw/again")
                asked(f"http://127.0.0.1:{port}/fail", fails=True)
                asked(f"http://127.0.0.1:{port}/style")
            return not empty()

        until_or_not(are_full, 40)
        assert empty() == []
        firing = 'ALERTS{alertstate="firing"}'
        expected = {"SigmascopeOutOfMemory", "SigmascopeLoraWithoutEffect"}
        until_or_not(
            lambda: expected <= {row["metric"]["alertname"] for row in asked_prometheus(source, firing)}, 40
        )
        assert expected <= {row["metric"]["alertname"] for row in asked_prometheus(source, firing)}

        def kept() -> int:
            command = [
                sys.executable,
                "-m",
                "sigmascope",
                "runs",
                "query",
                "SELECT count(*) AS n FROM runs",
                "--json",
            ]
            environment = {**os.environ, "SIGMASCOPE_STORE": store}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            counted: int = json.loads(done.stdout)[0]["n"]
            return counted

        until(lambda: kept() == 2 * (EACH + 1 + 2 * again), 60)
