"""The command line: `run` starts the operator, `render` prints the children of an LLMDeployment.

`render` needs no cluster: it reads the manifest, builds the children and prints them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from quire_operator import handlers, names, resources, spec
from quire_operator.errors import QuireOperatorError, SpecError
from quire_operator.settings import Settings
from quire_operator.spec import profiles

_EXIT_UNUSABLE = 2
_DEFAULT_IMAGE = "your-registry.example/quire-server:dev"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `quire-operator` and of `python -m quire_operator`."""
    options = _parser().parse_args(arguments)
    if options.command == "run":
        return handlers.main()
    try:
        text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text(encoding="utf-8")
        documents = render(text, os.environ)
    except (QuireOperatorError, yaml.YAMLError, OSError, UnicodeError) as error:
        sys.stderr.write(f"{options.file}: {error}\n")
        return _EXIT_UNUSABLE
    sys.stdout.write(dump(documents))
    return 0


def render(text: str, environ: Mapping[str, str]) -> list[resources.Manifest]:
    """The children of every LLMDeployment among the YAML documents, with the AcceleratorProfiles among them;
    other kinds are passed over.
    """
    settings = Settings.from_environ({"QUIRE_ENGINE_IMAGE": _DEFAULT_IMAGE, **environ})
    documents = [body for body in yaml.safe_load_all(text) if isinstance(body, Mapping)]
    bodies = [body for body in documents if body.get("kind") == names.KIND]
    if not bodies:
        raise QuireOperatorError(f"no document of kind {names.KIND}, apiVersion {names.API_VERSION}")
    known = [body for body in documents if body.get("kind") == names.PROFILE_KIND]
    by_name = {_name(body): profiles.parse(body) for body in known}
    return [child for body in bodies for child in _children(body, settings, by_name)]


def dump(documents: Sequence[resources.Manifest]) -> str:
    """As YAML, in the order of the manifests' own keys."""
    return yaml.dump_all(documents, Dumper=_PlainDumper, sort_keys=False, explicit_start=True)


def _children(
    body: Mapping[str, Any], settings: Settings, by_name: Mapping[str, spec.Profile]
) -> tuple[resources.Manifest, ...]:
    try:
        model = spec.parse(body)
        profile = _profile(model, by_name, body)
        prefill = None if model.prefill is None else _profile(model.prefill, by_name, body)
        return resources.build(model, settings, profile=profile, prefill_profile=prefill)
    except SpecError as error:
        raise QuireOperatorError(f"{names.KIND} {_name(body)}: {error}") from error


def _profile(
    model: spec.LLMDeployment, by_name: Mapping[str, spec.Profile], body: Mapping[str, Any]
) -> spec.Profile | None:
    """That of the pods of a role. `body`: the LLMDeployment as it was given."""
    reference = model.spec.resources.profile_ref
    if reference is not None and reference.name not in by_name:
        why = f"put the {names.PROFILE_KIND} {reference.name} into the same input"
        raise SpecError(_field_of_profile(reference.name, body["spec"]), why)
    return None if reference is None else by_name[reference.name]


def _field_of_profile(name: str, given: Mapping[str, Any]) -> str:
    """The first field that names this profile."""
    places = {"spec": given}
    for role, its in (given.get("disaggregation") or {}).items():
        if isinstance(its, Mapping):
            places[f"spec.disaggregation.{role}"] = its
    for place, its in places.items():
        if ((its.get("resources") or {}).get("profileRef") or {}).get("name") == name:
            return f"{place}.resources.profileRef"
    return "spec.resources.profileRef"


def _name(body: Mapping[str, Any]) -> str:
    metadata = body.get("metadata")
    return str(metadata.get("name") if isinstance(metadata, Mapping) else None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="quire-operator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help="run the operator against the cluster")
    command = commands.add_parser("render", help="print the manifests that an LLMDeployment becomes")
    command.add_argument("file", help="YAML file, - for standard input")
    return parser


class _PlainDumper(yaml.SafeDumper):
    """Writes a shared part twice, instead of once with a YAML anchor."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


if __name__ == "__main__":
    sys.exit(main())
