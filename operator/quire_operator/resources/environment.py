"""The environment variables that an LLMDeployment may give to its containers, by name.

An allow-list, because many variables make some library load code, read a file or talk to another host
(OPENSSL_CONF, NCCL_NET_PLUGIN, STORAGE_EMULATOR_HOST), and new ones come with each release of a dependency.
The administrator can add names. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire_operator import names
from quire_operator.errors import SpecError
from quire_operator.resources.manifest import Manifest, compact, literal
from quire_operator.settings import Settings
from quire_operator.spec import EnvVar

# Numbers of threads, sizes, and texts that appear in traces and logs.
SERVER = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GOMP_SPINCOUNT",
    "MALLOC_ARENA_MAX",
    "MKL_NUM_THREADS",
    "NCCL_DEBUG",
    "OMP_NUM_THREADS",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_SERVICE_NAME",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RAYON_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
)
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
DOWNLOAD = (*_PROXIES, *(name.lower() for name in _PROXIES))


def of_server(variables: Sequence[EnvVar], settings: Settings) -> list[Manifest]:
    """spec.engine.env. Fault injection is refused unless the administrator's settings allow it. Raises
    SpecError.
    """
    faults = (names.ENV_FAULT,) if settings.allow_faults else ()
    allowed = (*SERVER, *settings.allowed_env, *faults)
    rendered = _rendered("spec.engine.env", variables, allowed)
    if any(item.name == names.ENV_FAULT for item in variables):
        rendered.append({"name": names.ENV_ALLOW_FAULTS, "value": "1"})
    return rendered


def of_download(variables: Sequence[EnvVar], settings: Settings) -> list[Manifest]:
    """spec.cache.download.env. Raises SpecError."""
    return _rendered("spec.cache.download.env", variables, (*DOWNLOAD, *settings.allowed_env))


def _rendered(field: str, variables: Sequence[EnvVar], allowed: Iterable[str]) -> list[Manifest]:
    for index, item in enumerate(variables):
        if item.name in allowed:
            continue
        if item.name == names.ENV_FAULT:
            why = "breaks the server on purpose: the administrator must set allowFaults"
        else:
            why = (
                f"may make it load code or talk to other hosts: drop it (allowed are {', '.join(allowed)}), "
                "or ask the administrator to add it to allowedEnv"
            )
        raise SpecError(f"{field}[{index}].name", f"{item.name} {why}")
    return [compact({"name": item.name, "value": literal(item.value)}) for item in variables]
