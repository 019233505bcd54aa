"""The built images, looked into: their SBOM lists what is installed, and nothing in them installs programs.

What is there is read in other ways than the SBOM's writer does: dpkg's own table, the directories of
installed distributions, and the locks.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.utils import canonicalize_name

from e2e.images import build
from e2e.images.recipe import GATEWAY, IMAGES, SERVER, Recipe

pytestmark = [pytest.mark.images, pytest.mark.timeout(900)]  # where they have to be built first
ROOT = Path(__file__).parents[2]
OUT = "/mnt"
LOOK = f"""set -e
dpkg --list > {OUT}/dpkg
ls -d /opt/quire/lib/python3*/site-packages/*.dist-info > {OUT}/distributions
find / -xdev \\( -type f -o -type l \\) -perm /111 -printf '%p\\n' > {OUT}/programs
for python in /usr/bin/python3 /opt/quire/bin/python; do
    $python -c 'import importlib.util as i, sys; print(*filter(i.find_spec, sys.argv[1:]))' pip uv pipx conda
done > {OUT}/installers
cp /usr/share/sbom/*.cdx.json {OUT}/sbom
du -x -s -B 1M --exclude={OUT} --exclude=/proc --exclude=/sys --exclude=/dev / > {OUT}/size
"""
COMPILERS = {"as", "c++", "c99", "cc", "clang", "cpp", "g++", "gcc", "go", "ld", "nvcc", "rustc", "tcc"}
BUILDERS = {"autoconf", "cmake", "dpkg-buildpackage", "make", "meson", "ninja"}
DOWNLOADERS = {"aria2c", "curl", "ftp", "git", "nc", "ncat", "rsync", "scp", "ssh", "svn", "telnet", "wget"}
INSTALLERS = {"apt", "apt-get", "aptitude", "cargo", "conda", "gem", "npm", "pip", "pip3", "pipx", "uv"}
# Programs of a wheel that nothing starts through PATH.
IN_WHEELS = "/opt/quire/lib/"


@dataclass(frozen=True)
class Contents:
    """What an image says of itself, and what is found in it."""

    image: Recipe
    found: Path

    def lines(self, name: str) -> list[str]:
        return (self.found / name).read_text().splitlines()

    @property
    def sbom(self) -> str:
        return (self.found / "sbom").read_text()

    def listed(self, kind: str) -> list[tuple[str, str]]:
        """Names and versions of the components of one kind, as their package URLs have them."""
        urls = [PackageURL.from_string(each["purl"]) for each in json.loads(self.sbom)["components"]]
        return [(url.name, str(url.version)) for url in urls if url.type == kind]

    def named(self, names: set[str]) -> set[str]:
        """Programs of these names, with or without what Debian puts before and a version puts behind."""
        pattern = re.compile(rf"(?:[\w]+-linux-gnu-)?(?:{'|'.join(map(re.escape, names))})(?:-\d[\d.]*)?")
        paths = [path for path in self.lines("programs") if not path.startswith(IN_WHEELS)]
        return {path for path in paths if pattern.fullmatch(path.rpartition("/")[2])}


@pytest.fixture(scope="module", params=IMAGES, ids=lambda image: image.name)
def contents(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Contents:
    """The image of the working tree, built if it is not there."""
    return looked_into(request.param, tmp_path_factory.mktemp(request.param.name))


def looked_into(image: Recipe, found: Path) -> Contents:
    build.build(ROOT, os.environ, [image])
    build.run(ROOT, os.environ, image, ["sh", "-c", LOOK], {found: OUT})
    return Contents(image, found)


def test_the_sbom_has_as_many_components_as_are_installed_and_they_are_the_same(contents: Contents) -> None:
    rows = (line.split() for line in contents.lines("dpkg") if line.startswith("ii "))
    packages = {(name.partition(":")[0], version) for _, name, version, *_ in rows}
    assert len(packages) > 80
    assert sorted(packages) == sorted(contents.listed("deb"))

    directories = (path.rpartition("/")[2] for path in contents.lines("distributions"))
    names = (name.removesuffix(".dist-info").split("-") for name in directories)
    distributions = sorted((canonicalize_name(name), version) for name, version in names)
    assert distributions == sorted((canonicalize_name(n), v) for n, v in contents.listed("pypi"))
    assert len(json.loads(contents.sbom)["components"]) == len(packages) + len(distributions)


def test_the_python_distributions_of_an_image_are_those_of_its_lock(contents: Contents) -> None:
    (lock,) = (name for name in contents.image.requirements if not name.endswith("/uv.txt"))
    pins = re.findall(r"^([\w.-]+)==([^ \\]+)", (ROOT / lock).read_text(), re.MULTILINE)
    listed = {(canonicalize_name(name), version) for name, version in contents.listed("pypi")}
    assert listed == {(canonicalize_name(name), version) for name, version in pins}


def test_the_sbom_is_valid_cyclonedx_and_lies_beside_the_image_too(contents: Contents) -> None:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(contents.sbom) is None
    subject = json.loads(contents.sbom)["metadata"]["component"]
    assert subject["name"] == contents.image.name
    (beside,) = (ROOT / build.SBOMS).glob(f"{contents.image.name}_*.cdx.json")
    assert beside.read_text() == contents.sbom


def test_no_image_has_a_program_that_builds_downloads_or_installs_others(contents: Contents) -> None:
    assert any(path.endswith("/python3.11") for path in contents.lines("programs"))
    assert contents.named(BUILDERS | DOWNLOADERS | INSTALLERS) == set()
    assert contents.lines("installers") == ["", ""]


def test_only_the_server_which_needs_it_for_triton_has_a_compiler(contents: Contents) -> None:
    compilers = {path.rpartition("/")[2] for path in contents.named(COMPILERS)}
    if contents.image is not SERVER:
        assert compilers == set()
    else:
        assert {"as", "cc", "cpp", "gcc", "ld"} <= compilers
        assert not compilers & {"c++", "clang", "g++", "go", "nvcc", "rustc", "tcc"}


# As the user of the image, without what a pod gets from Kubernetes.
START_THE_GATEWAY = f"""cd {OUT}
setpriv --reuid=65532 --regid=65532 --clear-groups quire-gateway 2> said || echo $? > status
"""


def test_the_gateway_s_image_is_small_and_its_program_starts_without_torch_and_kopf(tmp_path: Path) -> None:
    contents = looked_into(GATEWAY, tmp_path)
    installed = {name for name, _ in contents.listed("pypi")}
    assert "aiohttp" in installed
    assert not installed & {"kopf", "kubernetes", "numpy", "torch"}
    assert int(contents.lines("size")[0].split()[0]) <= 280  # MB of files, with quire-batch; 90 MB to pull

    build.run(ROOT, os.environ, GATEWAY, ["sh", "-c", START_THE_GATEWAY], {tmp_path: OUT})
    assert contents.lines("status") == ["2"]
    assert contents.lines("said")[-1].startswith("error: the gateway runs in a pod")


# What Triton does before the first launch of a kernel, but for linking it with a GPU's driver.
BUILD_A_LAUNCHER = f"""
from triton.backends.nvidia import driver
from triton.runtime.build import _build
source = driver.make_launcher({{}}, {{0: '*fp32', 1: 'i32'}}, None)
open('/tmp/launcher.c', 'w').write(source)
built = _build('launcher', '/tmp/launcher.c', '/tmp', [], driver.include_dirs, [], [])
open('{OUT}/launcher', 'w').write(built)
"""


@pytest.mark.deep
def test_the_compiler_of_the_server_builds_what_triton_asks_of_it(tmp_path: Path) -> None:
    build.build(ROOT, os.environ, [SERVER])
    command = ["/opt/quire/bin/python", "-c", BUILD_A_LAUNCHER]
    build.run(ROOT, os.environ, SERVER, command, {tmp_path: OUT})
    assert (tmp_path / "launcher").read_text().endswith(".so")
