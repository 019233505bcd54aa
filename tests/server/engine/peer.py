"""A minimal client of the engine's socket."""

import socket

from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import StepEvents
from quire_server.engine.messages import EngineInputs, EngineOutputs, FrameReader, to_frame
from quire_server.engine.socket_server import SOCKET_NAME


class Peer:
    """A minimal client that sends and receives frames."""

    def __init__(self, engine):
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(str(engine.run_dir / SOCKET_NAME))  # waits while the queue of others is full
        self.connection.settimeout(5)
        self.reader = FrameReader()
        self.inbox = []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.connection.close()

    def send(self, *requests, aborts=()):
        self.connection.sendall(to_frame(EngineInputs(requests, aborts)))

    def messages(self):
        while True:
            while self.inbox:
                yield self.inbox.pop(0)
            data = self.connection.recv(65536)
            if not data:
                return
            self.inbox += self.reader.feed(data)

    def events(self):
        for message in self.messages():
            if isinstance(message, EngineOutputs):
                yield from StepEvents(message.request_ids, message.token_ids, message.events)

    def answer(self, request_id):
        tokens = []
        for event in self.events():
            if event.request_id == request_id:
                tokens += event.token_ids
                if event.finish_reason is not None:
                    return tokens, event
        raise AssertionError("the connection ended")


def make_request(name, prompt=(5,), max_tokens=3, **more):
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(name, tuple(prompt), sampling, **{"arrival": 0.0, **more})
