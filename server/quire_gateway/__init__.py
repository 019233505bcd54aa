"""The gateway: relays OpenAI requests to the replicas of LLMDeployments.

Chooses a replica for each request, relays the answer byte by byte, and asks another replica where one fails
before it has answered. Knows no engine, no tokenizer and no schema; what it shares with the server and the
operator are names and documents, which tests/contracts compare.
"""
