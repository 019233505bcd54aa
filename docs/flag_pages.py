"""docs/server.md: every flag of `quire-server serve`, and the field of the LLMDeployment that sets it.

Called by `docs.generate`. The fields are found by leaving one after the other out of the example that has
them all, and looking which variables of the pod change.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from e2e.api import specs
from quire_operator import spec
from quire_operator.errors import SpecError
from quire_operator.resources import config_map
from quire_operator.spec import rules
from quire_server.config import ServeConfig
from quire_server.flags import ENV_PREFIX

# Fields that cannot be left out alone, since another one needs them.
_NEEDED = {
    "api_keys_dir": "security.apiKeysSecretRef",
    "kv_offload_host_bytes": "engine.kvCache.hostOffload",
    "log_requests": "observability.requestLogging.mode",
    "speculative_method": "engine.speculation.method",
    "speculative_model": "engine.speculation.draftModelPath",
    "watermark_key_path": "engine.watermark.keySecretRef",
}

HEAD = """# Server flags

Every flag of `quire-server serve MODEL`, made by `make docs`. Each is an environment variable, too
(`--max-num-seqs` is `QUIRE_MAX_NUM_SEQS`); a flag beats its variable. Those that are on or off have a second
form with `no-`.

On a cluster a flag is set by the field that stands beside it. What has none goes to `engine.extraArgs`, one
element for each: `--seed=1`. *operator* means that no user sets it. `MODEL` is `/models` in a pod, with
`model.source.pvc.path` below it, so a file of the volume has its path there:

```
kubectl patch llmdep my-model --type=merge -p \\
  '{"spec": {"engine": {"extraArgs": ["--chat-template=/models/chat_template.jinja"]}}}'
```

| flag | default | meaning | field of an `LLMDeployment` |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    fields = _fields()
    flags = (flag for flag in dataclasses.fields(ServeConfig) if flag.name != "model")
    return HEAD + "".join(_row(flag, fields) for flag in flags)


def _row(flag: dataclasses.Field[Any], fields: dict[str, str]) -> str:
    name = flag.name.replace("_", "-")
    default = "" if flag.default in (None, ()) else f"`{str(flag.default).lower()}`"
    if name in rules.RESERVED_FLAGS:
        field = f"`{fields[flag.name]}`" if flag.name in fields else "*operator*"
    else:
        field = ""
    return f"| `--{name}` | {default} | {flag.metadata['help'].replace('|', chr(92) + '|')} | {field} |\n"


def _fields() -> dict[str, str]:
    """Flag -> the field that sets it: of those without which it changes, the one that changes least."""
    whole = _variables(specs.FULL)
    found: dict[str, tuple[int, str]] = {}
    for path in _paths(specs.FULL["spec"]):
        body = copy.deepcopy(specs.FULL)
        inner = body["spec"]
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        try:
            without = _variables(body)
        except SpecError:
            continue
        changed = [name for name in whole.keys() | without.keys() if whole.get(name) != without.get(name)]
        for name in changed:
            flag = name.removeprefix(ENV_PREFIX).lower()
            best = found.get(flag, (len(whole), ""))
            found[flag] = min(best, (len(changed), ".".join(path)), key=lambda one: (one[0], -len(one[1])))
    return {flag: path for flag, (_, path) in found.items()} | _NEEDED


def _variables(body: dict[str, Any]) -> dict[str, str]:
    data: dict[str, str] = config_map.build(spec.parse(body))["data"]
    return data


def _paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key in value if isinstance(value, dict) else ():
        yield (*path, key)
        yield from _paths(value[key], (*path, key))
