"""The engine process and the API process's view of it.

`loop` drives scheduler and runner, `canary` proves that inference still works, `loading` brings the model
up, `inbox` is the engine's end of the socket and `client` the API's. `messages` is all that crosses it:
typed msgpack, no pickle.
"""
