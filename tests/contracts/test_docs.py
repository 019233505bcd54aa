"""What the pages say is what the code does: the reference is generated, the README's manifest is valid."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

from quire_operator import resources, spec
from quire_operator.settings import Settings

ROOT = Path(__file__).parents[2]


def test_the_generated_pages_are_what_the_code_gives():
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


def test_every_link_between_pages_leads_to_a_file():
    pages = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [*pages, *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
