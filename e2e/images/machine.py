"""What a build needs to know of this machine to reach package indexes, and must not leave in an image.

CA bundle, proxy and index travel as build secrets: a mounted file each, gone when the build step ends.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_SYSTEM_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_MOUNTED = "/run/secrets/ca"
_PROXY = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@contextmanager
def secrets(environ: Mapping[str, str]) -> Iterator[dict[str, Path]]:
    """The secrets `env` and, where the machine has a CA bundle, `ca`."""
    bundle = ca_bundle(environ)
    index = environ.get("PIP_INDEX_URL") or _configured_index()
    with TemporaryDirectory(prefix="quire-build-") as directory:
        script = Path(directory) / "env"
        script.write_text(shell_script(environ, index, has_bundle=bundle is not None))
        yield {"env": script, **({"ca": bundle} if bundle else {})}


def ca_bundle(environ: Mapping[str, str]) -> Path | None:
    """The certificates that this machine trusts."""
    named = environ.get("SSL_CERT_FILE") or environ.get("PIP_CERT")
    bundle = Path(named) if named else _SYSTEM_BUNDLE
    return bundle if bundle.is_file() else None


def shell_script(environ: Mapping[str, str], index: str | None, *, has_bundle: bool) -> str:
    """Exports for pip, uv and apt inside a build step (pure)."""
    exports = {name: environ[name] for name in _PROXY if name in environ}
    if has_bundle:
        exports |= {"SSL_CERT_FILE": _MOUNTED, "PIP_CERT": _MOUNTED}
    if index:
        exports |= {"PIP_INDEX_URL": index, "UV_DEFAULT_INDEX": index}
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in exports.items())


def _configured_index() -> str | None:
    argv = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    done = subprocess.run(argv, capture_output=True, text=True)
    return done.stdout.strip() or None if done.returncode == 0 else None
