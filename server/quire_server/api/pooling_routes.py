"""The routes of a server with `--task embed`, with what each takes and answers for /openapi.json, and which
routes a task has.
"""

from __future__ import annotations

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.routing import BaseRoute

from quire_server.api import pooling, routes
from quire_server.api.exchange_response import ExchangeResponse
from quire_server.api.protocol import responses
from quire_server.api.protocol.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from quire_server.api.routes import GENERATION_PATHS, POSTING, answers, body, new_router

REQUESTS: tuple[type[BaseModel], ...] = (EmbeddingRequest, RerankRequest, ScoreRequest)
RESPONSES: tuple[type[BaseModel], ...] = (
    responses.Embeddings,
    responses.Pooled,
    responses.Ranking,
    responses.Scores,
)

router = new_router()


@router.post(
    "/v1/embeddings",
    operation_id="embed",
    summary="The vectors of texts.",
    responses=answers(responses.Embeddings, *POSTING, 403, 429),
    openapi_extra=body(EmbeddingRequest),
)
async def embeddings(request: Request) -> Response:
    """OpenAI's embeddings."""
    return ExchangeResponse(pooling.embeddings)


@router.post(
    "/pooling",
    operation_id="pool",
    summary="The same vectors, in vLLM's shape.",
    responses=answers(responses.Pooled, *POSTING, 403, 429),
    openapi_extra=body(EmbeddingRequest),
)
async def pool(request: Request) -> Response:
    """vLLM's pooling."""
    return ExchangeResponse(pooling.pooling)


@router.post(
    "/v1/rerank",
    operation_id="rerank",
    summary="Documents by how well they fit a query.",
    responses=answers(responses.Ranking, *POSTING, 403, 429),
    openapi_extra=body(RerankRequest),
)
async def rerank(request: Request) -> Response:
    """Cohere's and Jina's rerank."""
    return ExchangeResponse(pooling.rerank)


@router.post(
    "/v1/score",
    operation_id="score",
    summary="How well the texts of pairs fit each other.",
    responses=answers(responses.Scores, *POSTING, 403, 429),
    openapi_extra=body(ScoreRequest),
)
async def score(request: Request) -> Response:
    """vLLM's score."""
    return ExchangeResponse(pooling.score)


def of_task(task: str) -> list[BaseRoute]:
    """The routes of a server with this ``--task``."""
    if task == "generate":
        return routes.router.routes
    common = [one for one in routes.router.routes if getattr(one, "path", "") not in GENERATION_PATHS]
    return [*common, *router.routes]


def models_of_task(task: str) -> tuple[tuple[type[BaseModel], ...], tuple[type[BaseModel], ...]]:
    """(requests, responses) that the document of such a server describes."""
    if task == "generate":
        return routes.REQUESTS, routes.RESPONSES
    return (*REQUESTS, *routes.COMMON_REQUESTS), (*RESPONSES, *routes.COMMON_RESPONSES)
