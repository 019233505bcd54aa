"""Whatever is killed at whatever moment, the next `up` or `down` recovers, and other clusters are left alone.

A second cluster in a directory of its own does the dying.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e.cluster import cgroups, claims, host, lifecycle, mounts, network, process, programs, teardown
from e2e.cluster.layout import MAX_NODES, RUN_ROOT, Checkout, Cluster

pytestmark = pytest.mark.cluster
WAIT_SECONDS = 200.0  # long enough for a machine that is busy with something else

REPOSITORY = Path(__file__).parents[2]

POD = """
apiVersion: v1
kind: Pod
metadata: {name: NAME}
spec:
  nodeName: NODE
  containers:
    - name: pause
      image: localhost/quire-pause:1
      imagePullPolicy: Never
      volumeMounts: [{name: memory, mountPath: /memory}]
  volumes:
    - name: memory
      emptyDir: {medium: Memory, sizeLimit: 1Mi}
"""


PORT = 7000
ANSWER_WITH_THE_CALLERS_ADDRESS = f"""
import socket, sys
server = socket.create_server((sys.argv[1], {PORT}))
print("listens", flush=True)
connection, caller = server.accept()
connection.sendall(caller[0].encode())
connection.close()
"""
CONNECT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60)
print(connection.recv(100).decode() if sys.argv[3] == "read" else "", end="")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    if os.geteuid() != 0 or host.missing_packages():
        reason = "needs root and the packages that `make setup` installs"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    programs.build(REPOSITORY / ".cluster/bin")
    checkout = Checkout.at(tmp_path)
    checkout.state.mkdir()
    checkout.bin.symlink_to(REPOSITORY / ".cluster/bin")
    yield checkout
    lifecycle.down(checkout.root)


def _run_pod(cluster: Cluster) -> str:
    """Runs a pod on the node whose view of the cluster this is; returns its address."""
    kubectl = [str(cluster.checkout.bin / "kubectl"), f"--kubeconfig={cluster.kubeconfig}"]
    name = f"victim-of-{cluster.name}"
    body = POD.replace("NAME", name).replace("NODE", cluster.name)
    subprocess.run([*kubectl, "apply", "--filename=-"], input=body, text=True, check=True)
    wait = ["wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={WAIT_SECONDS:.0f}s"]
    subprocess.run([*kubectl, *wait], check=True)
    get = ["get", "pod", name, "--output=jsonpath={.status.podIP}"]
    return subprocess.run([*kubectl, *get], capture_output=True, text=True, check=True).stdout


def _nodes(checkout: Checkout) -> list[Checkout]:
    return [checkout.of_node(number) for number in range(1, MAX_NODES + 1)]


def _everything_of(checkout: Checkout) -> set[int]:
    recorded = {record.pid for record in process.recorded(checkout.records) if process.is_alive(record)}
    in_pods = {pid for node in _nodes(checkout) for pid in cgroups.processes(node.cgroup)}
    return recorded | teardown.shims(checkout) | in_pods


def _kill_everything_of(checkout: Checkout) -> None:
    process.kill_all(lambda: _everything_of(checkout))


def _assert_nothing_is_left(checkout: Checkout) -> None:
    assert _everything_of(checkout) == set()
    assert mounts.below(checkout.run) == [] == mounts.below(checkout.state)
    assert not checkout.run.exists()
    assert not any(cgroups.exists(node.cgroup) for node in _nodes(checkout))
    assert not network.has_interface(checkout.veth)
    assert (
        str(checkout.run) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    )
    left = {path.name for path in checkout.state.iterdir()} if checkout.state.exists() else set()
    assert left <= {"bin", "containerd", "node-2", "registry", "log", "lock"}
    assert {path.name for path in checkout.of_node(2).own.glob("*")} <= {"containerd"}


@pytest.mark.deep
def test_up_recovers_from_a_kill_of_everything_and_down_leaves_nothing(checkout: Checkout) -> None:
    _run_pod(lifecycle.up(checkout.root))
    _kill_everything_of(checkout)
    assert not lifecycle.is_healthy(checkout)
    assert mounts.below(checkout.run) and mounts.below(checkout.kubelet)
    assert network.has_interface(checkout.veth) and cgroups.exists(checkout.cgroup)

    cluster = lifecycle.up(checkout.root)
    assert lifecycle.is_healthy(checkout)
    _run_pod(cluster)

    _kill_everything_of(checkout)
    lifecycle.down(checkout.root)
    _assert_nothing_is_left(checkout)


@pytest.mark.deep
def test_pods_of_two_nodes_reach_each_other_and_down_leaves_nothing_of_either(checkout: Checkout) -> None:
    one = lifecycle.up(checkout.root, nodes=2)
    (two,) = one.others
    addresses = [_run_pod(one), _run_pod(two)]
    services = [(str(one.addresses.api_service_ip), 443), (str(one.addresses.dns_ip), 53)]
    for here, there, own, other in ((one, two, *addresses), (two, one, *reversed(addresses))):
        with _in_pod(there, ANSWER_WITH_THE_CALLERS_ADDRESS, other) as server:
            assert server.stdout is not None and server.stdout.readline() == "listens\n"
            assert _connect_from_pod(here, (other, PORT)) == own, "a pod is seen under its own address"
        for service in services:
            _connect_from_pod(here, service, says=False)

    network.cut_wire(two)
    with pytest.raises(subprocess.CalledProcessError):
        _connect_from_pod(two, services[0], says=False)
    network.mend_wire(two)
    _connect_from_pod(two, services[0], says=False)

    assert lifecycle.up(checkout.root) == one, "without a number it stays as it is"
    lifecycle.down(checkout.root)
    _assert_nothing_is_left(checkout)


@pytest.mark.deep
def test_up_of_a_running_cluster_changes_nothing(checkout: Checkout) -> None:
    lifecycle.up(checkout.root)
    before = process.recorded(checkout.records)
    lifecycle.up(checkout.root)
    assert process.recorded(checkout.records) == before


@pytest.mark.deep
def test_up_keeps_the_registry_that_images_are_being_pushed_to(checkout: Checkout) -> None:
    lifecycle.start_registry(checkout.root)
    first = process.recorded(checkout.records)
    assert {record.name for record in first} == {"containerd", "registry"}

    lifecycle.up(checkout.root)

    assert lifecycle.is_healthy(checkout)
    assert {*first} <= {*process.recorded(checkout.records)}
    lifecycle.start_registry(checkout.root)
    assert lifecycle.is_healthy(checkout), "of a running cluster it changes nothing"


@pytest.mark.deep
def test_up_replaces_a_registry_that_does_not_answer(checkout: Checkout) -> None:
    lifecycle.start_registry(checkout.root)
    (stopped,) = [record for record in process.recorded(checkout.records) if record.name == "registry"]
    os.kill(stopped.pid, signal.SIGSTOP)

    lifecycle.up(checkout.root)

    assert lifecycle.is_healthy(checkout)
    assert not process.is_alive(stopped)


@pytest.mark.deep
@pytest.mark.parametrize(
    "moment", ["claim.json", "netns", "processes/registry", "processes/etcd", "processes/kubelet"]
)
def test_up_killed_half_way_is_cleaned_by_down(checkout: Checkout, moment: str) -> None:
    with _command("up", checkout) as up:
        _wait_for(lambda: (checkout.run / moment).exists() or up.poll() is not None)
        up.send_signal(signal.SIGKILL)
        assert up.wait() == -signal.SIGKILL, f"`up` ended before {moment} was there"
    lifecycle.down(checkout.root)
    _assert_nothing_is_left(checkout)


@pytest.mark.deep
@pytest.mark.one_in(3)
@pytest.mark.parametrize("moment", ["kubeconfig gone", "containerd dead", "veth gone"])
def test_down_killed_half_way_is_finished_by_the_next(checkout: Checkout, moment: str) -> None:
    _run_pod(lifecycle.up(checkout.root))
    happened = {
        "kubeconfig gone": lambda: not checkout.kubeconfig.exists(),
        "containerd dead": lambda: not _is_running(checkout, "containerd"),
        "veth gone": lambda: not network.has_interface(checkout.veth),
    }
    with _command("down", checkout):
        _wait_for(happened[moment])
    lifecycle.down(checkout.root)
    _assert_nothing_is_left(checkout)


@pytest.mark.deep
def test_a_cluster_of_a_deleted_checkout_is_swept_and_a_living_one_is_not(checkout: Checkout) -> None:
    other = checkout.root.with_name("other")
    lifecycle.up(checkout.root)
    lifecycle.down(other)
    assert lifecycle.is_healthy(checkout)
    # A user's rm gets far, but not through the kubelet's mount point.
    subprocess.run(["rm", "-rf", str(checkout.root)], capture_output=True)
    lifecycle.down(other)
    assert not checkout.root.exists()
    _assert_nothing_is_left(checkout)


@pytest.mark.deep
def test_the_hosts_settings_come_back_with_the_last_cluster_and_not_before(checkout: Checkout) -> None:
    others = claims.claimed()
    before = host.sysctls()
    lifecycle.up(checkout.root)
    during = host.sysctls()
    lifecycle.down(checkout.root)
    assert host.sysctls() == (during if others else before)
    assert bool(list(RUN_ROOT.iterdir())) == bool(others)


def _pod_netns(node: Cluster) -> Path:
    """The network namespace of the only pod of a node."""
    (path,) = (node.checkout.run / "containerd/io.containerd.grpc.v1.cri/netns").iterdir()
    return path


def _inside_pod(node: Cluster, program: str, *arguments: object) -> list[str]:
    """A command line of Python in the network of the only pod of a node."""
    return ["nsenter", f"--net={_pod_netns(node)}", sys.executable, "-c", program, *map(str, arguments)]


@contextmanager
def _in_pod(node: Cluster, program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Runs it during the block."""
    with subprocess.Popen(
        _inside_pod(node, program, *arguments), stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def _connect_from_pod(node: Cluster, address: tuple[str, int], *, says: bool = True) -> str:
    """What an address says to the only pod of a node."""
    argv = _inside_pod(node, CONNECT, *address, "read" if says else "close")
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@contextmanager
def _command(name: str, checkout: Checkout) -> Iterator[subprocess.Popen[bytes]]:
    """It is killed at the end of the block, if it has not ended before."""
    with subprocess.Popen(
        [sys.executable, "-m", "e2e.cluster", name, "--root", str(checkout.root)],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if name != "KUBECONFIG"},
        stdout=subprocess.DEVNULL,
    ) as command:
        try:
            yield command
        finally:
            command.kill()


def _is_running(checkout: Checkout, name: str) -> bool:
    return any(r.name == name and process.is_alive(r) for r in process.recorded(checkout.records))


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_SECONDS:.0f} s"
        time.sleep(0.001)
