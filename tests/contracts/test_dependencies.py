"""No lock, and no lower bound of pyproject.toml, lets a version in that is known to be vulnerable.

Floors are compared here, because a feed of advisories cannot be reached everywhere; `make audit` asks one.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.contracts import source_code

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
ADVISORY = re.compile(r"(CVE-\d{4}-\d{4,}|GHSA(-[0-9a-z]{4}){3}|PYSEC-\d{4}-\d+)")


def locks() -> dict[str, dict[str, Version]]:
    """The versions in each lock."""
    found = {}
    for path in sorted(REQUIREMENTS.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        if "--hash=" in text:
            pins = re.findall(r"^([\w.-]+)==([^ \\]+)", text, re.MULTILINE)
            found[path.name] = {canonicalize_name(name): Version(version) for name, version in pins}
    return found


def rows(name: str) -> list[str]:
    lines = (REQUIREMENTS / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def floors() -> dict[str, Version]:
    """The oldest version that each package may have."""
    found = {}
    for row in rows("floors.txt"):
        requirement = Requirement(row.partition("#")[0])
        (specifier,) = requirement.specifier
        assert specifier.operator == ">=", row
        found[canonicalize_name(requirement.name)] = Version(specifier.version)
    return found


def declared() -> Iterator[Requirement]:
    """What pyproject.toml asks for: of users (extras), and of who works on Quire (groups)."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = [*document["project"]["optional-dependencies"].values(), *document["dependency-groups"].values()]
    yield from (Requirement(each) for group in groups for each in group)


@pytest.mark.parametrize("lock", locks())
def test_no_lock_has_a_version_below_its_floor(lock: str) -> None:
    pins = locks()[lock]
    below = {name: str(pins[name]) for name, floor in floors().items() if name in pins and pins[name] < floor}
    assert below == {}


def test_no_lower_bound_of_the_project_is_below_its_floor() -> None:
    limits = floors()
    below = []
    for requirement in declared():
        floor = limits.get(canonicalize_name(requirement.name))
        bounds = [each for each in requirement.specifier if each.operator in (">=", "==", "~=")]
        if floor and not any(Version(each.version.removesuffix(".*")) >= floor for each in bounds):
            below.append(f"{requirement}, floor {floor}")
    assert below == []


def test_every_floor_names_its_advisory_and_a_package_that_is_locked() -> None:
    locked = set().union(*locks().values())
    for row in rows("floors.txt"):
        assert ADVISORY.fullmatch(row.partition("#")[2].strip()), row
    assert set(floors()) <= locked, "a floor of something that is no longer used"


def test_the_locks_are_resolved_under_the_floors() -> None:
    commands = dry_run("lock")
    assert len(commands) == len(locks()) - len({"uv.txt", "model.txt"})
    assert all("--constraint requirements/floors.txt" in command for command in commands)


def test_the_public_workflow_audits_every_lock_strictly() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert "make audit" in steps
    (command,) = (line for line in dry_run("audit") if "pip-audit" in line)
    words = shlex.split(command)
    assert {"--strict", "--require-hashes", "--disable-pip"} <= set(words)
    audited = {Path(path).name for flag, path in zip(words, words[1:], strict=False) if flag == "-r"}
    assert audited == set(locks())
    ignored = {name for flag, name in zip(words, words[1:], strict=False) if flag == "--ignore-vuln"}
    assert ignored == {row.split()[0] for row in rows("accepted-advisories.txt")}


def test_no_code_of_quire_uses_what_an_accepted_advisory_is_about() -> None:
    affected = {}
    for row in rows("accepted-advisories.txt"):
        advisory, module, reason = row.split(maxsplit=2)
        assert ADVISORY.fullmatch(advisory) and reason, row
        assert any(module.partition(".")[0] in pins for pins in locks().values()), f"{module} is not locked"
        affected[module] = advisory
    used = [
        f"{path.relative_to(ROOT)} uses {module}: {advisory}"
        for folder in ("kernels", "operator", "server")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for module, advisory in affected.items()
        if module in modules(path)
    ]
    assert used == []


def modules(path: Path) -> set[str]:
    """The modules that a file imports, and the dotted names that it uses, with all that contain them."""
    source = source_code.of_file(path)
    names = source.imports | source.attributes
    return {".".join(name.split(".")[:length]) for name in names for length in range(1, name.count(".") + 2)}


def dry_run(target: str) -> list[str]:
    """The commands of `make TARGET` that resolve or audit, without what it would install first."""
    old = ["--assume-old=.venv/.ready", "--assume-old=.venv/.up"]
    asked = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", *old, target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = asked.stdout.replace("\\\n", " ").splitlines()
    return [line for line in lines if "uv pip compile" in line or "bin/pip-audit" in line]
