"""What the machine must have (packages, a module) and what the kubelet changes on it (sysctls).

`plan` shows it, `lifecycle` does it, `teardown` undoes it. The sysctls belong to all clusters of the machine
together: saved before the first one starts, put back when the last one goes.
"""

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster import process
from e2e.cluster.errors import HostError
from e2e.cluster.layout import RUN_ROOT

CNI_DIRS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))

# package -> a program that it brings
_PROGRAMS = {
    "containerd": "containerd",
    "runc": "runc",
    "iproute2": "ip",
    "iptables": "iptables",
    "util-linux": "nsenter",
    "docker-registry": "docker-registry",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
}
_CNI_PACKAGE = "containernetworking-plugins"

# The kubelet sets these and does not ask (its KernelTunable list).
KUBELET_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
_SYSCTLS = Path("/proc/sys")
_SAVED = RUN_ROOT / "sysctls.json"


def cni_dir() -> Path | None:
    """Where the CNI plugins are."""
    return next((path for path in CNI_DIRS if (path / "bridge").exists()), None)


def missing_packages() -> list[str]:
    """Debian's names of what is not installed."""
    missing = [
        p for p, program in _PROGRAMS.items() if shutil.which(program, path=process.PROGRAM_PATH) is None
    ]
    return missing if cni_dir() else [*missing, _CNI_PACKAGE]


def install(packages: list[str]) -> None:
    """Installs packages where root and apt allow, else says which command does."""
    if not packages:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise HostError(f"missing: {', '.join(packages)}. Install them: sudo {' '.join(command)}")
    print(f"installing {' '.join(packages)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update", "-q"], command):
        run = subprocess.run(
            step, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if run.returncode != 0:
            raise HostError(f"{' '.join(step)} failed:\n{run.stderr[-2000:]}")


def require_root() -> None:
    """A node needs namespaces, mounts and cgroups."""
    if os.geteuid() != 0:
        raise HostError("a cluster needs root: run as root, or let KUBECONFIG name another cluster")


def needs_bridge_module() -> bool:
    """Whether the kernel must load br_netfilter (where it is not built in)."""
    return not (_SYSCTLS / "net/bridge").exists() and shutil.which("modprobe") is not None


def load_bridge_module() -> None:
    """Loads it; a kernel without modules has it built in or does without."""
    if needs_bridge_module():
        subprocess.run(["modprobe", "br_netfilter"], check=False, capture_output=True)


@contextmanager
def machine_lock() -> Iterator[None]:
    """Held while the clusters of a machine are counted, claimed or released."""
    RUN_ROOT.mkdir(parents=True, exist_ok=True)
    directory = os.open(RUN_ROOT, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def sysctls() -> dict[str, str]:
    """The present values of what the kubelet will set."""
    return {
        name: (_SYSCTLS / name).read_text().strip() for name in KUBELET_SYSCTLS if (_SYSCTLS / name).exists()
    }


def save_sysctls() -> None:
    """Remembers them, unless an earlier cluster did (call with the machine locked)."""
    if not _SAVED.exists():
        new = _SAVED.with_suffix(".new")
        new.write_text(json.dumps(sysctls()))
        new.rename(_SAVED)


def restore_sysctls() -> None:
    """Puts them back (call with the machine locked, when no cluster is left)."""
    if not _SAVED.exists():
        return
    now = sysctls()
    for name, value in json.loads(_SAVED.read_text()).items():
        if now.get(name) != value:
            (_SYSCTLS / name).write_text(value)
    _SAVED.unlink()
