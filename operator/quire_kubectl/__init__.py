"""``kubectl quire``: what a person asks of an LLMDeployment at a terminal.

A plugin that kubectl finds by its name. Knows the operator's pure parts and nothing of its cluster access.
"""
