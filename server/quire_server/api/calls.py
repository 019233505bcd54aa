"""The two kinds of completion requests, parsed once on entry into frozen objects.

Called by `completions`. Says which fields each route has of its own, and which ones are accepted only where
they change nothing. Pure: no tokenizer, no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire_server.api.chat_messages import parse_messages
from quire_server.api.errors import bad_field
from quire_server.api.fields import INT64, Fields, is_token_ids
from quire_server.api.generation_fields import Generation, parse_generation
from quire_server.api.sampling_defaults import SamplingDefaults
from quire_server.api.sampling_fields import MAX_LOGPROBS

MAX_CHOICES = 64
CHARACTERS_PER_TOKEN = 4
COMPLETION_MAX_TOKENS = 16  # OpenAI's default of /v1/completions

# Known fields that this server does not implement, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "spaces_between_special_tokens": (True,),
}
NEUTRAL_CHAT: dict[str, tuple[object, ...]] = {
    **_NEUTRAL,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
NEUTRAL_COMPLETION: dict[str, tuple[object, ...]] = {**_NEUTRAL, "best_of": (1,), "suffix": ("",)}


@dataclass(frozen=True)
class ChatCall:
    """A request to /v1/chat/completions."""

    messages: tuple[dict[str, str], ...]
    generation: Generation

    @property
    def rough_tokens(self) -> int:
        """Prompt tokens of all answers, about: nothing is tokenised yet."""
        characters = sum(len(message["content"]) for message in self.messages)
        return characters // CHARACTERS_PER_TOKEN * self.generation.n


@dataclass(frozen=True)
class CompletionCall:
    """A request to /v1/completions; each prompt is text or token ids."""

    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    generation: Generation

    @property
    def scores_prompt(self) -> bool:
        """Whether the echoed prompt comes with its log-probabilities."""
        return self.echo and self.generation.sampling.logprobs is not None

    @property
    def rough_tokens(self) -> int:
        """As of ChatCall."""
        texts = sum(len(prompt) for prompt in self.prompts if isinstance(prompt, str))
        ids = sum(len(prompt) for prompt in self.prompts if not isinstance(prompt, str))
        return (texts // CHARACTERS_PER_TOKEN + ids) * self.generation.n


def parse_chat(body: dict[str, object], defaults: SamplingDefaults, vocab_size: int) -> ChatCall:
    """A chat request from its JSON object. Raises ApiError."""
    fields = Fields(body)
    messages = parse_messages(fields)
    wanted = fields.boolean("logprobs", default=False)
    top = fields.integer("top_logprobs", None, 0, MAX_LOGPROBS)
    if top and not wanted:
        raise fields.error("top_logprobs", "needs logprobs to be true")
    long_name = fields.integer("max_completion_tokens", None, 1, INT64)
    max_tokens = fields.integer("max_tokens", long_name, 1, INT64)
    if long_name is not None and max_tokens != long_name:
        raise fields.error("max_tokens", "contradicts max_completion_tokens; send one of them")
    for name, allowed in NEUTRAL_CHAT.items():
        fields.only(name, allowed)
    logprobs = (top or 0) if wanted else None
    return ChatCall(messages, parse_generation(fields, defaults, vocab_size, max_tokens, logprobs))


def parse_completion(body: dict[str, object], defaults: SamplingDefaults, vocab_size: int) -> CompletionCall:
    """A completion request from its JSON object. Raises ApiError."""
    fields = Fields(body)
    prompts = _prompts(fields, vocab_size)
    echo = fields.boolean("echo", default=False)
    logprobs = fields.integer("logprobs", None, 0, MAX_LOGPROBS)
    max_tokens = fields.integer("max_tokens", COMPLETION_MAX_TOKENS, 0, INT64)
    if max_tokens == 0 and not echo:
        raise fields.error("max_tokens", "must be at least 1, except with echo")
    for name, allowed in NEUTRAL_COMPLETION.items():
        fields.only(name, allowed)
    generation = parse_generation(fields, defaults, vocab_size, max_tokens, logprobs)
    if len(prompts) * generation.n > MAX_CHOICES:
        raise bad_field(
            "n", f"{len(prompts)} prompts times {generation.n} answers are more than {MAX_CHOICES}"
        )
    if echo and logprobs is not None:
        generation = _with_prompt_logprobs(fields, generation, logprobs)
    return CompletionCall(prompts, echo, generation)


def _with_prompt_logprobs(fields: Fields, generation: Generation, logprobs: int) -> Generation:
    """The echoed prompt's log-probabilities are the answer's: as many, and told with them."""
    if generation.stream or generation.n > 1:
        raise fields.error("logprobs", "is not supported together with echo and stream or n")
    if generation.sampling.prompt_logprobs not in (None, logprobs):
        raise fields.error("prompt_logprobs", "must be what logprobs is, where echo is true")
    # lm-eval takes the last token for the answer and the others for the prompt, so none may be missing.
    text = replace(generation.text, weigh_stop=True)
    return replace(generation, sampling=replace(generation.sampling, prompt_logprobs=logprobs), text=text)


def _prompts(fields: Fields, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    value = fields.take("prompt")
    if isinstance(value, str):
        return (value,)
    wrong = fields.error("prompt", "must be a string, a list of strings, or a list of token ids of the model")
    if not isinstance(value, list) or not value:
        raise wrong
    if is_token_ids(value, vocab_size):
        return (tuple(value),)
    if len(value) > MAX_CHOICES:
        raise fields.error("prompt", f"must have at most {MAX_CHOICES} prompts")
    prompts: list[str | tuple[int, ...]] = []
    for item in value:
        if isinstance(item, list) and item and is_token_ids(item, vocab_size):
            prompts.append(tuple(item))
        elif isinstance(item, str):
            prompts.append(item)
        else:
            raise wrong
    return tuple(prompts)
