"""The order of `make up`: registry; cluster, images and model; operator; example; question.

With KUBECONFIG naming another cluster nothing of `e2e.cluster` starts.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import yaml

from e2e import cluster
from e2e.cluster import plan
from e2e.cluster.layout import MAX_NODES
from e2e.images import build
from e2e.images.build import References
from e2e.images.target import Target
from e2e.kubectl import Kubectl
from e2e.up import estimate, plugin, question, together, waiting
from e2e.up.errors import UpError
from e2e.up.place import Place

_EXAMPLE = Path("examples/smollm2.yaml")
_OPERATOR_NAMESPACE = "quire-system"
_GATEWAY = "quire-gateway"
_READY_SECONDS = 300


def run(root: Path, environ: Mapping[str, str]) -> None:
    """Everything, from a checkout to the model's answer."""
    began, nodes = time.monotonic(), _nodes(environ)
    place = Place.of(root, environ)
    if place.is_ours:
        print(plan.describe(place.checkout, plan.observe(place.checkout, nodes)), flush=True)
    else:
        print(f"KUBECONFIG={place.kubectl.kubeconfig} is used as it is: no cluster is started", flush=True)
        Target.of(root, environ)  # says what is missing before anything is built
    print(estimate.describe(estimate.missing(place.checkout, environ, is_ours=place.is_ours)), flush=True)
    if place.is_ours:
        cluster.start_registry(root, nodes)
    plugin.install(place.checkout)
    _step(began, "programs and cluster, images, model" if place.is_ours else "programs, images, model")
    together.run(_preparations(is_ours=place.is_ours, nodes=nodes), root)
    images = _release(place, root, environ, began)
    _serve(place, root, images, began, has_gateway=_has_gateway(environ))


def _nodes(environ: Mapping[str, str]) -> int | None:
    """How many nodes are asked for: `make up NODES=2`. None for as many as there are, or one."""
    text = environ.get("NODES")
    if not text:
        return None
    if text not in map(str, range(1, MAX_NODES + 1)):
        raise UpError(f"NODES={text}: give a number from 1 to {MAX_NODES}")
    return int(text)


def _has_gateway(environ: Mapping[str, str]) -> bool:
    """Whether clients are to ask a gateway: `make up GATEWAY=1`."""
    text = environ.get("GATEWAY", "")
    if text not in ("", "0", "1"):
        raise UpError(f"GATEWAY={text}: give 1 or 0")
    return text == "1"


def undo(place: Place) -> str:
    """What takes away what `run` has made."""
    command = "make down" if place.is_ours else f"helm uninstall quire -n {_OPERATOR_NAMESPACE}"
    return f"`{command}` takes it away"


def _preparations(*, is_ours: bool, nodes: int | None) -> dict[str, list[str]]:
    """The cluster starts as soon as its programs are built, while images are made and pushed."""
    start = ["start", *([f"--nodes={nodes}"] if nodes else [])]
    command = start if is_ours else ["build", "--only", "kube", "helm"]
    return {
        "cluster" if is_ours else "programs": [sys.executable, "-m", "e2e.cluster", *command],
        "images": [sys.executable, "-m", "e2e.up.artifacts", "push"],
    }


def _release(place: Place, root: Path, environ: Mapping[str, str], began: float) -> References:
    """Installs the operator. All images are in the registry: it may replace model servers at once.

    They are pushed once more for what was edited meanwhile; to find that nothing was takes a second.
    """
    _step(began, "operator")
    together.run({"push": [sys.executable, "-m", "e2e.images", "push"]}, root)
    images = build.references(root, Target.of(root, environ).registry, environ)
    place.kubectl.apply(_restricted(_OPERATOR_NAMESPACE))
    together.run({"operator": place.kubectl.helm_argv(*_install_arguments(root, images, environ))}, root)
    return images


def _install_arguments(root: Path, images: References, environ: Mapping[str, str]) -> list[str]:
    values = []
    named = {"image": images.operator, "engineImage": images.server}
    if _has_gateway(environ):
        namespace = yaml.safe_load((root / _EXAMPLE).read_text())["metadata"]["namespace"]
        named["gateway.image"] = images.gateway
        values += ["--set", f"gateway.enabled=true,gateway.namespaces={{{namespace}}}"]
        values += ["--set", "gateway.resources.requests.cpu=50m"]  # one small node has it all
    for value, reference in named.items():
        repository, tag = reference.rsplit(":", 1)
        values += ["--set", f"{value}.repository={repository}", "--set-string", f"{value}.tag={tag}"]
    chart = str(root / "charts" / "quire")
    place = ["-n", _OPERATOR_NAMESPACE, "--wait", "--timeout=180s", "--hide-notes"]
    return ["upgrade", "--install", "quire", chart, *place, *values]


def _restricted(namespace: str) -> dict[str, object]:
    """A namespace whose pods may do no more than ours need."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}}


def _serve(place: Place, root: Path, images: References, began: float, *, has_gateway: bool) -> None:
    kubectl = place.kubectl
    manifest = yaml.safe_load((root / _EXAMPLE).read_text())
    name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
    served_name = manifest["spec"]["model"]["servedName"]
    _step(began, f"LLMDeployment {name} ({_EXAMPLE})")
    place.volumes(images.server).provide(place.model, namespace)
    # The server that was just built is what `make up` is run again for.
    kubectl.apply({**manifest, "spec": {**manifest["spec"], "rollout": {"adoptOperatorDefaults": "Always"}}})
    waiting.until_ready(kubectl, name, namespace, images.server, seconds=_READY_SECONDS)
    service = (name, namespace)
    if has_gateway:  # there the model has the name of its LLMDeployment
        service, served_name = (_GATEWAY, _OPERATOR_NAMESPACE), name
    if place.is_ours:
        _remove_old_images(kubectl, root)
        url = question.service_url(kubectl, *service)
        if has_gateway:
            question.wait_until_served(url, served_name)
        answer = question.ask(url, served_name)
    else:
        with question.forwarded_url(kubectl, *service) as url:
            if has_gateway:
                question.wait_until_served(url, served_name)
            answer = question.ask(url, served_name)
    print(f"\n  {question.QUESTION}\n  {answer.strip()}\n", flush=True)
    print(_how_to_go_on(place, root, url, service, served_name))
    print(f"\nup after {time.monotonic() - began:.0f} s; {undo(place)}")


def _remove_old_images(kubectl: Kubectl, root: Path) -> None:
    pods = json.loads(kubectl.run("get", "pods", "--all-namespaces", "-o", "json"))["items"]
    used = {container["image"] for pod in pods for container in pod["spec"]["containers"]}
    cluster.remove_unused(cluster.current(root), used)


def _how_to_go_on(place: Place, root: Path, url: str, service: tuple[str, str], served_name: str) -> str:
    path = f"export KUBECONFIG={place.kubectl.kubeconfig} PATH={root / '.cluster' / 'bin'}:$PATH"
    body = question.request_body(served_name)
    curl = f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    if place.is_ours:
        return f"Go on with:\n  {path}\n  kubectl get llmdep\n  {curl}"
    name, namespace = service
    forward = f"kubectl port-forward -n {namespace} service/{name} {url.rsplit(':', 1)[1]}:80 &"
    return f"Go on with:\n  {path}\n  kubectl get llmdep\n  {forward}\n  {curl}"


def _step(began: float, what: str) -> None:
    print(f"\n== {what} ({time.monotonic() - began:.0f} s)", flush=True)
