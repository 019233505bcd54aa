"""``kubectl quire``: shows, sizes and previews LLMDeployments at a terminal.

A plugin that kubectl finds by its name. Uses the pure parts of the operator and not its cluster access.
"""
