"""What every HTTP server of ours needs, the inference server and the gateway alike.

uvicorn with the limits of a public server, a drain that breaks no response, exchanges on bare ASGI, and
OpenAI's error body. Knows no engine, no model and no cluster: a process that only relays loads none of them.
"""
