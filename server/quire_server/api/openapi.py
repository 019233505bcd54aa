"""The OpenAPI document: FastAPI's of the routes, with the models' schemas and what one server knows of
itself.

The routes name the models by reference (see `routes`). Their schemas are added here, because FastAPI's own
model of the document rounds bounds to floats. The served names, the vocabularies and the model's sampling
defaults enter the schemas once they are known; `requests` checks them a second time after the models.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from quire_server import __version__
from quire_server.api.pooling_routes import models_of_task, of_task
from quire_server.api.protocol.validation import TOKEN_ID, Json
from quire_server.core.sampling_params import declarations
from quire_server.model_dir.generation_config import SamplingDefaults

_REF = "#/components/schemas/{model}"


def document(
    models: Sequence[str] = (),
    vocab_size: int | None = None,
    text_vocab_size: int | None = None,
    defaults: SamplingDefaults | None = None,
    task: str = "generate",
) -> Json:
    """The document of one server where its models' names and vocabularies (of the model, and of its
    tokenizer) are given; of any server otherwise.
    """
    known = copy.deepcopy(_general(task))
    schemas = known["components"]["schemas"]
    if vocab_size is not None:
        for name, schema in schemas.items():
            size = text_vocab_size or vocab_size if name == "DetokenizeRequest" else vocab_size
            for token in _token_ids(schema):
                token["maximum"] = size - 1
    for request in models_of_task(task)[0]:
        schema = schemas[request.__name__]
        for choice in schema.get("anyOf", [schema]):
            properties = choice["properties"]
            if models and "model" in properties:
                nulls = [] if "model" in choice["required"] else [None]
                about = properties["model"]["description"]
                properties["model"] = {"enum": [*models, *nulls], "description": about}
            for one in declarations():
                if defaults is not None and one.field.model_default and one.name in properties:
                    properties[one.name]["default"] = getattr(defaults.sampling, one.name)
    if models:
        parameter = known["paths"]["/v1/models/{model}"]["get"]["parameters"][0]
        parameter["schema"] = {"enum": list(models)}
    return known


@functools.cache
def _general(task: str) -> Json:
    """The document of any server of a task."""
    known = get_openapi(
        title="Quire", version=__version__, routes=of_task(task), license_info={"name": "Apache-2.0"}
    )
    known["security"] = [{"key": []}]
    components = known.setdefault("components", {})
    about = "Or the same key in the header x-api-key."
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": about}}
    models: Any = [(model, "validation") for group in models_of_task(task) for model in group]
    components["schemas"] = models_json_schema(models, ref_template=_REF)[1]["$defs"]
    return known


def _token_ids(schema: object) -> Iterator[Json]:
    """The schemas of token ids within a schema."""
    if isinstance(schema, dict):
        if schema.get("format") == TOKEN_ID:
            yield schema
        for inner in schema.values():
            yield from _token_ids(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _token_ids(inner)
