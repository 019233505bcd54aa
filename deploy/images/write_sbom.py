"""Writes what is installed in an image as CycloneDX: Debian's packages, and Python's of /opt/quire.

Runs inside the image while it is built, on the standard library alone: a program that was installed to write
the list would have to be on it. The same contents give the same bytes: the document has no time and no random
number. Knows nothing of how the image was built.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import uuid
from collections.abc import Iterator
from importlib.metadata import distributions
from typing import Any
from urllib.parse import quote

# One line for each package of dpkg's database: also of those of which only the configuration is left.
_FIELDS = r"${db:Status-Status}\t${Package}\t${Version}\t${Architecture}\t${source:Package}\n"


def main(argv: list[str]) -> None:
    """Writes the document of the image in which it runs to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the image")
    parser.add_argument("version", help="of the project")
    arguments = parser.parse_args(argv)
    listed = subprocess.run(
        ["dpkg-query", "--show", f"--showformat={_FIELDS}"], stdout=subprocess.PIPE, text=True, check=True
    )
    release = platform.freedesktop_os_release()
    packages = debian_packages(listed.stdout, f"{release['ID']}-{release['VERSION_ID']}")
    components = [*packages, *python_distributions()]
    json.dump(document(arguments.name, arguments.version, components), sys.stdout, indent=1)


def debian_packages(listed: str, distro: str) -> Iterator[dict[str, Any]]:
    """The components for the output of dpkg-query (pure).

    Advisories of Debian name the source package, so a package that has another name says which it is.
    """
    for line in listed.splitlines():
        status, name, version, architecture, source = line.split("\t")
        if status == "installed":
            upstream = f"&upstream={quote(source, safe='')}" if source != name else ""
            place = f"pkg:deb/debian/{quote(name, safe='')}@{quote(version, safe='')}"
            yield component(name, version, f"{place}?arch={architecture}&distro={distro}{upstream}")


def python_distributions() -> Iterator[dict[str, Any]]:
    """The components of the interpreter's own environment: what Debian brings of Python is in dpkg's list."""
    for distribution in distributions(path=[path for path in sys.path if path.startswith(sys.prefix)]):
        name, version = distribution.metadata["Name"], distribution.version
        yield component(name, version, f"pkg:pypi/{quote(name.lower().replace('_', '-'))}@{quote(version)}")


def component(name: str, version: str, purl: str) -> dict[str, Any]:
    """One component; its package URL is also its reference (pure)."""
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def document(name: str, version: str, components: list[dict[str, Any]]) -> dict[str, Any]:
    """The document of an image (pure)."""
    listed = sorted(components, key=lambda each: each["purl"])
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([name, version, listed]))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": name, "name": name, "version": version}},
        "components": listed,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
