"""The engine process and the API process's view of it.

`engine_core` drives scheduler and model runner, `canary` checks that inference still works, `loading` loads
the model, `socket_server` is the engine's end of the socket and `client` the API process's end. `messages`
are what is sent over it: typed msgpack, no pickle.
"""
