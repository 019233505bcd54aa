"""What the gateway reads of OpenAI's API: only what it routes by. The engine validates the rest."""
