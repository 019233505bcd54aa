"""Decodes the messages of steps and echoes them, as a rank does that computes nothing: `python -m
bench.step_follower DESCRIPTOR`, of a connected socket (used by ``bench.step_message``).

A program of its own, because a process that imports torch takes many seconds to start.
"""

import socket
import sys

from quire_server.core.rank_step import Echo, RankLimits
from quire_server.engine.rank_channel import Channel, ChannelClosedError
from quire_server.engine.step_codec import MAX_STEP_BYTES, StepDecoder, encode_echo

LIMITS = RankLimits(512, 1 << 16, 0, 0, 4096, 1 << 17)
PING, AGAIN = b"ping", b"again"  # again: from the first step on


def follow(connection: socket.socket) -> None:
    """Until the other side closes the connection."""
    channel, decoder = Channel(connection), StepDecoder(LIMITS)
    try:
        while True:
            body = channel.receive(MAX_STEP_BYTES)
            if body in (PING, AGAIN):
                channel.send(body)
                decoder = StepDecoder(LIMITS) if body == AGAIN else decoder
                continue
            decoder.decode(body)
            channel.send(encode_echo(Echo(decoder.sequence, decoder.digest)))
    except ChannelClosedError:
        return


if __name__ == "__main__":
    follow(socket.socket(fileno=int(sys.argv[1])))
