"""The API process: OpenAI routes over the engine's socket.

Tokenises, validates, admits, streams; knows HTTP and text, and of the engine only `engine.client`.
Middleware is plain ASGI: anything that wraps `receive` hides the client's disconnect.
"""
