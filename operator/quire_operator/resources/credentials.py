"""Where a download may send the credentials of a Secret: the check of an LLMDeployment against the
administrator's settings.

Who creates an LLMDeployment can name any Secret of the namespace, and need not be allowed to read it. So a
credential goes to the service that it is for, or to hosts that the administrator trusts with it, and a proxy
on the way counts as one of these, since the spec also says whose certificates are trusted. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from quire_operator.errors import SpecError
from quire_operator.settings import Settings
from quire_operator.spec import LLMDeployment
from quire_operator.spec.schema import Source

_HUB = "huggingface.co"
# Clients disagree about what else an address may be, and so about its host.
_ADDRESS = re.compile(
    r"([a-z0-9]+://)?([^\s/?#@\\]*@)?(?P<host>[A-Za-z0-9][-A-Za-z0-9.]*|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?"
)


def check(model: LLMDeployment, settings: Settings) -> None:
    """Raises SpecError for an endpoint or a proxy that may not get the credentials."""
    cache, trusted = model.spec.cache, settings.credential_hosts
    sources = {"spec.model.source": model.spec.model.source}
    sources |= {f"spec.adapters[{index}].source": one.source for index, one in enumerate(model.spec.adapters)}
    for field, source in sources.items():
        _check_endpoint(field, source, trusted)
    has_identity = model.spec.security.identity.workload != "None"
    if cache is None or not (has_identity or any(source.has_credentials for source in sources.values())):
        return
    for index, variable in enumerate(cache.download.env):
        is_proxy = variable.name.lower() in ("http_proxy", "https_proxy", "all_proxy")
        if is_proxy and variable.value:
            _check_host(f"spec.cache.download.env[{index}].value", variable.value, trusted)


def _check_endpoint(field: str, source: Source, trusted: Sequence[str]) -> None:
    hub, s3 = source.hugging_face, source.s3
    if hub is not None and hub.token_secret_ref is not None and hub.endpoint:
        _check_host(f"{field}.huggingFace.endpoint", hub.endpoint, (_HUB, *trusted))
    if s3 is not None and s3.credentials_secret_ref is not None and s3.endpoint:
        _check_host(f"{field}.s3.endpoint", s3.endpoint, trusted)


def _check_host(field: str, address: str, trusted: Iterable[str]) -> None:
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise SpecError(
            field, f"{address!r:.80} is no address of a host: write for example http://proxy:3128"
        )
    host = found["host"].strip("[]").lower()
    if not any(_matches(host, each) for each in trusted):
        raise SpecError(
            field,
            f"{host!r:.80} may not get the credentials of a Secret or of the pods' identity: drop them, or "
            "ask the administrator to add the host to credentialHosts",
        )


def _matches(host: str, trusted: str) -> bool:
    return host.endswith(trusted[1:]) if trusted.startswith("*") else host == trusted
