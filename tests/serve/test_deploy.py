"""The files in deploy/ agree with the code."""

import importlib.metadata
import json
import re
import typing
from dataclasses import fields
from pathlib import Path

import servers
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from foredraft.cli.flags import FlagGroup
from foredraft.serve.metrics import ServerMetrics
from foredraft.serve.options import ServeOptions

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
IMAGE = (DEPLOY / "Dockerfile").read_text("utf-8")


def test_every_metric_of_the_dashboard_exists_and_every_metric_of_ours_is_shown():
    families = list(ServerMetrics(servers.generator()).registry.collect())
    known = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    dashboard = json.loads((DEPLOY / "grafana.json").read_text("utf-8"))
    text = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    shown = {name.removesuffix("_bucket") for name in re.findall(r"foredraft_\w+", text)}
    assert shown == {name for name in known if name.startswith("foredraft_")}


def test_the_page_names_every_option_and_every_metric():
    page = (ROOT / "docs" / "serving.md").read_text("utf-8")
    options = [name for each in fields(ServeOptions) for name in FlagGroup(ServeOptions, "")._names(each)]
    assert [name for name in options if f"`{name}`" not in page] == []
    families = ServerMetrics(servers.generator()).registry.collect()
    assert [family.name for family in families if family.name not in page] == []


def test_the_unit_and_the_image_leave_time_to_drain():
    unit = (DEPLOY / "foredraft.service").read_text("utf-8")
    seconds = int(typing.cast(re.Match[str], re.search(r"TimeoutStopSec=(\d+)", unit))[1])
    assert seconds > ServeOptions().drain_seconds
    assert 'ENTRYPOINT ["foredraft", "serve"' in IMAGE


def shipped(name: str, extras: frozenset[str], found: set[str]) -> set[str]:
    """A package with all that it needs here, from the metadata of what is installed."""
    for line in importlib.metadata.requires(name) or ():
        needed = Requirement(line)
        environments = [{"extra": extra} for extra in extras or {""}]
        wanted = needed.marker is None or any(needed.marker.evaluate(each) for each in environments)
        key = canonicalize_name(needed.name)
        if wanted and (key not in found or needed.extras):
            found.add(key)
            shipped(key, frozenset(needed.extras), found)
    return found


def test_the_image_installs_pinned_versions_only():
    pinned = re.findall(r"^([a-z0-9.-]+)==", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    ships = shipped("foredraft", frozenset({"serve"}), set()) - {"foredraft"}
    gpu = {name for name in ships if name.startswith(("nvidia-", "cuda-"))}  # their versions are torch's own
    assert len(ships) > 30 and ships - gpu - set(pinned) == set()
    installs = re.findall(r"pip install .*", IMAGE)
    assert len(installs) == 2 and all("-c /src/constraints.txt" in each for each in installs)


def test_the_image_copies_all_files_that_the_wheel_is_built_from():
    copied = {name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", IMAGE, re.MULTILINE) for name in line.split()}
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    named = re.findall(r'^(?:readme|path) = "(.*)"$|^license-files = \["(.*)"\]$', project, re.MULTILINE)
    files = {name for names in named for name in names if name}
    assert {"README.md", "LICENSE", "hatch_build.py"} <= files
    assert files | {"pyproject.toml", "src", "constraints.txt"} == copied
