"""The list of an image's contents: what counts as installed, and how it is written."""

import json
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from deploy.images import write_sbom

LISTED = (
    "installed\tlibc6\t2.36-9+deb12u10\tamd64\tglibc\n"
    "config-files\tpython3-venv\t3.11.2-1+b1\tamd64\tpython3-defaults\n"
    "installed\tdebconf\t1:1.5.82\tall\tdebconf\n"
)


def components() -> list[dict[str, Any]]:
    return [
        *write_sbom.debian_packages(LISTED, "debian-12"),
        write_sbom.component("torch", "2.11.0", "pkg:pypi/torch@2.11.0"),
    ]


def test_a_package_of_which_only_the_configuration_is_left_is_not_installed() -> None:
    assert [each["name"] for each in components()] == ["libc6", "debconf", "torch"]


def test_a_debian_package_names_its_source_by_which_advisories_are_found() -> None:
    libc, debconf, _ = components()
    place = "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10"
    assert libc["purl"] == f"{place}?arch=amd64&distro=debian-12&upstream=glibc"
    assert debconf["purl"] == "pkg:deb/debian/debconf@1%3A1.5.82?arch=all&distro=debian-12"


def test_the_document_is_valid_and_follows_from_the_contents_alone() -> None:
    written = write_sbom.document("quire-server", "0.1.0", components())
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(written)) is None
    assert written == write_sbom.document("quire-server", "0.1.0", components()[::-1])
    other = write_sbom.document("quire-server", "0.1.0", components()[:1])
    assert written["serialNumber"] != other["serialNumber"]
