"""What a request's span says, in the words of OpenTelemetry's conventions for generative AI and for HTTP.

Called by `completions`. Pure. Stop strings, prompts and answers are the client's text and are in none of it.
"""

from __future__ import annotations

from quire_server.api.delivery import Tally
from quire_server.api.generation_fields import Generation
from quire_server.api.tracing import Attributes

#: gen_ai.operation.name by route.
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


def arrived(path: str, request_id: str) -> Attributes:
    """Before anything has been read."""
    return {
        "http.request.method": "POST",
        "url.path": path,
        "http.route": path,
        "quire.request.id": request_id,
        "gen_ai.operation.name": OPERATIONS[path],
        "gen_ai.provider.name": "quire",
    }


def asked(generation: Generation) -> Attributes:
    """What was asked for, once it is parsed."""
    sampling = generation.sampling
    known = {
        "gen_ai.request.model": generation.model,
        "gen_ai.response.model": generation.model,
        "gen_ai.request.max_tokens": generation.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stream": generation.stream,
        "gen_ai.request.choice.count": generation.n,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.output.type": "text",
    }
    return {name: value for name, value in known.items() if value is not None}


def ended(response_id: str, status: str, code: int | None, prompt_tokens: int, tally: Tally) -> Attributes:
    """What came of it. ``code``: the HTTP status, None where nobody was there to be told one."""
    told = {} if code is None else {"http.response.status_code": code}
    return {
        **told,
        "quire.status": status,
        "gen_ai.response.id": response_id,
        "gen_ai.response.finish_reasons": tuple(
            tally.finish_reasons[index] for index in sorted(tally.finish_reasons)
        ),
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": tally.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": tally.cached_tokens(prompt_tokens),
    }
