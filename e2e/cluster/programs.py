"""Builds the cluster's programs from Go modules into `.cluster/bin`, once per content.

A program's key is the hash of its module's files, its flags and the Go release, so that a second build costs
one `go env`. Must not know what a node does with them.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cluster.errors import BuildError, HostError
from e2e.progress import Progress

SOURCES = Path(__file__).parent / "go"
OLDEST_GO = (1, 24)

# A compiler lives for seconds: without its garbage collector (until 2 GiB) and debug information a build is a
# quarter shorter.
_COMPILER = {"GOGC": "off", "GOMEMLIMIT": "2GiB"}
_GO_ENVIRONMENT = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "", "GOWORK": "off", **_COMPILER}

_VERSION_PACKAGE = "k8s.io/component-base/version"
KUBERNETES_VERSION = "v1.34.4"
# One module for what a running cluster needs, so that what its programs share is compiled once.
_CLUSTER = "cluster"


@dataclass(frozen=True)
class Program:
    """One binary, and the Go module of `e2e/cluster/go` that it is made from."""

    name: str
    module: str
    package: str = "."
    ldflags: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    oldest_go: tuple[int, int] = field(default=OLDEST_GO, repr=False)
    # How many packages there are to compile. Not part of the key: it is only shown.
    steps: int = field(default=1000, repr=False)


PROGRAMS = (
    Program(
        name="kube",
        module=_CLUSTER,
        package="./kube",
        steps=2760,
        ldflags=(
            # Without these kubectl, Helm and the kubelet take the cluster for v0.0.0-master.
            f"-X {_VERSION_PACKAGE}.gitVersion={KUBERNETES_VERSION}",
            f"-X {_VERSION_PACKAGE}.gitMajor=1",
            f"-X {_VERSION_PACKAGE}.gitMinor=34",
            f"-X {_VERSION_PACKAGE}.gitTreeState=clean",
        ),
        links=(
            "etcd",
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kube-proxy",
            "kubelet",
            "kubectl",
        ),
    ),
    Program(name="pause", module=_CLUSTER, package="./pause"),
    Program(name="coredns", module=_CLUSTER, package="./coredns"),
    Program(name="otelcol", module="otelcol"),
    Program(name="verdicts", module="verdicts"),
    Program(name="reachability", module="reachability"),
    Program(name="versitygw", module="versitygw", package="github.com/versity/versitygw/cmd/versitygw"),
    Program(name="fakegcs", module="fakegcs", package="github.com/fsouza/fake-gcs-server"),
    Program(
        name="kubeconform",
        module="kubeconform",
        package="github.com/yannh/kubeconform/cmd/kubeconform",
        ldflags=("-X main.version=v0.7.0",),
    ),
    Program(
        name="lws",
        module="lws",
        package="sigs.k8s.io/lws/cmd",
        ldflags=("-X sigs.k8s.io/lws/pkg/version.GitVersion=v0.9.0",),
        oldest_go=(1, 26),
        steps=830,
    ),
    Program(
        name="helm",
        module=_CLUSTER,
        package="helm.sh/helm/v3/cmd/helm",
        ldflags=(
            "-X helm.sh/helm/v3/internal/version.version=v3.19.5",
            "-X helm.sh/helm/v3/internal/version.gitTreeState=clean",
        ),
    ),
)


# What a running cluster consists of, and what `make up` needs besides. The other programs are for tests.
OF_THE_NODE = ("kube", "pause", "coredns")
OF_UP = (*OF_THE_NODE, "helm")
# What several nodes are there for: groups of pods.
OF_SEVERAL_NODES = ("lws",)


def of_cluster(nodes: int) -> tuple[str, ...]:
    """What a running cluster of so many nodes consists of."""
    return OF_THE_NODE if nodes == 1 else (*OF_THE_NODE, *OF_SEVERAL_NODES)


def key(program: Program, sources: Path, go_version: str) -> str:
    """What the binary depends on, as one hash."""
    digest = hashlib.sha256(repr((program, go_version)).encode())
    module = sources / program.module
    for path in sorted(path for path in module.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(module)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def build(bin_dir: Path, names: tuple[str, ...] = ()) -> None:
    """Builds what is not there yet (all programs, or those named), showing progress."""
    bin_dir.mkdir(parents=True, exist_ok=True)
    with (bin_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = unbuilt(bin_dir)
        for program in PROGRAMS:
            if program.name not in wanted or (names and program.name not in names):
                continue
            _compile(program, bin_dir)
            for link in program.links:
                (bin_dir / link).unlink(missing_ok=True)
                (bin_dir / link).symlink_to(program.name)
            _stamp(program, bin_dir).write_text(wanted[program.name])


def unbuilt(bin_dir: Path) -> dict[str, str]:
    """The programs that are missing or made from something else, with the key that they would have."""
    go_version, _ = _go()
    keys = {program: key(program, SOURCES, go_version) for program in PROGRAMS}
    return {
        program.name: wanted
        for program, wanted in keys.items()
        if not (bin_dir / program.name).exists()
        or not _stamp(program, bin_dir).exists()
        or _stamp(program, bin_dir).read_text() != wanted
    }


def _stamp(program: Program, bin_dir: Path) -> Path:
    return bin_dir / f".{program.name}.key"


def _go() -> tuple[str, tuple[int, int]]:
    """The release of Go, as text and as numbers."""
    if shutil.which("go") is None:
        raise HostError(f"Go is not installed: install Go >= {_written(OLDEST_GO)} and put it on PATH")
    run = subprocess.run(["go", "env", "GOVERSION"], capture_output=True, text=True, check=True, cwd="/")
    version = run.stdout.strip()
    found = re.match(r"go(\d+)\.(\d+)", version)
    return version, (int(found[1]), int(found[2])) if found else (0, 0)


def _written(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def check_go(program: Program, version: str, release: tuple[int, int]) -> None:
    """Raises HostError where this release of Go is too old for the program."""
    if release < program.oldest_go:
        wanted = _written(program.oldest_go)
        raise HostError(f"{version} is too old for {program.name}: install Go >= {wanted} and put it on PATH")


def _compile(program: Program, bin_dir: Path) -> None:
    check_go(program, *_go())
    print(f"building {program.name} (Go modules are fetched and compiled once)", flush=True)
    began, status = time.monotonic(), Progress()
    new = bin_dir / f".{program.name}.new"
    linked = ["-ldflags", " ".join(("-s -w", *program.ldflags))]
    flags = ["-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false -c=1", *linked]
    said: list[str] = []
    compiled = 0
    with subprocess.Popen(
        ["go", "build", "-v", *flags, "-o", str(new), program.package],
        cwd=SOURCES / program.module,
        env={**os.environ, **_GO_ENVIRONMENT},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            compiled += not line.startswith("go: ")
            status.update(f"{program.name}: {compiled} of at most {program.steps} packages: {line.strip()}")
    status.end()
    if process.returncode != 0:
        raise BuildError(f"{program.name} did not build:\n{''.join(said[-20:])}")
    # A rename, so that a build killed half-way leaves no half binary and a running program keeps its own.
    new.rename(bin_dir / program.name)
    print(f"built {program.name} in {time.monotonic() - began:.0f} s", flush=True)
