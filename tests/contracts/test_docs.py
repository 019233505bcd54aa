"""The documentation agrees with the code: generated pages are up to date, manifests and links are valid."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

from e2e.api import specs
from quire_operator import resources, spec
from quire_operator.settings import Settings

ROOT = Path(__file__).parents[2]


def test_the_generated_pages_are_up_to_date():
    done = subprocess.run(
        [sys.executable, "-m", "docs.generate", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_manifest_in_the_readme_renders():
    (manifest,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    body = yaml.safe_load(manifest)
    body["metadata"] |= {"namespace": "default", "uid": "0", "generation": 1}

    kinds = [m["kind"] for m in resources.build(spec.parse(body), Settings(engine_image="quire-server:0"))]

    assert "Deployment" in kinds and "Service" in kinds


def test_every_link_between_pages_refers_to_a_file():
    pages = [*ROOT.glob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [*pages, *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_page_is_in_the_navigation_and_on_the_first_page():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert {page for entry in nav for page in entry.values() if isinstance(page, str)} == pages
    decisions = {path.name for path in (ROOT / "docs" / "adr").glob("*.md")}
    assert {page.removeprefix("adr/") for entry in nav for page in entry.get("Decisions", ())} == decisions
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert linked == pages - {"index.md"}


def test_every_flag_that_a_field_sets_has_that_field_on_the_page():
    page = (ROOT / "docs" / "server.md").read_text()
    rows = re.findall(r"^\| `--([\w-]+)` \|.*\| ([^|]*) \|$", page, flags=re.M)
    operator_only = {"canary-golden-path", "device", "health-port", "host", "port", "termination-log"} | {
        *("gateway-audience", "gateway-keys-dir"),
        *("kv-producers", "kv-role", "kv-transfer-port"),
        *("leader-address", "node-rank", "pod-address", "start-delay-seconds"),
    }
    assert {flag for flag, field in rows if field == "*operator*"} == operator_only
    fields = {path.removeprefix("spec.") for path, _ in specs.schemas() if path.startswith("spec.")}
    assert {field.strip("`") for _, field in rows} - {"", "*operator*"} <= fields
