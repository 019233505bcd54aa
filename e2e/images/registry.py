"""The digest that a tag has at its registry now, by the API of the distribution specification.

Asked here, because no program that asks registries is on every machine. Knows nothing of building images.
"""

import hashlib
import json
import re
import urllib.error
import urllib.request
from urllib.parse import urlencode

from e2e.images.errors import ImageError

_DOCKER_HUB = "registry-1.docker.io"
# An index first: a base is named for all platforms.
_ACCEPT = (
    "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json, "
    "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
)
_SECONDS = 30


def digest(image: str) -> str:
    """`sha256:...` of what the tag names; computed from the manifest, whatever the registry says it is."""
    registry, repository, tag = split(image)
    scheme = "http" if registry.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
    url = f"{scheme}://{registry}/v2/{repository}/manifests/{tag}"
    try:
        try:
            manifest = _get(url, {})
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            token = _token(error.headers.get("WWW-Authenticate", ""), repository)
            manifest = _get(url, {"Authorization": f"Bearer {token}"})
    except (OSError, ValueError) as error:
        raise ImageError(f"{registry} does not say what {image} is: {error}") from None
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}"


def split(image: str) -> tuple[str, str, str]:
    """Registry, repository and tag of a name, completed as docker does (pure)."""
    first, slash, rest = image.partition("/")
    if slash and (first == "localhost" or "." in first or ":" in first):
        registry, path = first, rest
    else:
        registry, path = _DOCKER_HUB, image if slash else f"library/{image}"
    repository, _, tag = path.partition(":")
    return registry, repository, tag or "latest"


def _get(url: str, headers: dict[str, str]) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": _ACCEPT, **headers})
    with urllib.request.urlopen(request, timeout=_SECONDS) as response:
        body: bytes = response.read()
        return body


def _token(challenge: str, repository: str) -> str:
    """An anonymous token, from the service that the registry names."""
    asked = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = urlencode({"service": asked.get("service", ""), "scope": f"repository:{repository}:pull"})
    document = json.loads(_get(f"{asked.get('realm', '')}?{query}", {}))
    return str(document.get("token") or document.get("access_token") or "")
