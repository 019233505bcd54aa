"""What is known of one request's drafts. Kept with its sequence, changed by ``speculation`` alone."""

from dataclasses import dataclass

from quire_server.core.draft_length import Acceptance
from quire_server.core.prompt_lookup import PromptLookup


@dataclass(slots=True)
class Drafting:
    """``length`` tokens are drafted next, once the sequence has ``resume_at`` tokens."""

    lookup: PromptLookup
    acceptance: Acceptance
    length: int = 0
    resume_at: int = 0
    pause: int = 0  # tokens of the latest pause; 0 = drafting pays
