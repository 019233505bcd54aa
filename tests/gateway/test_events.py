"""Streams are passed on byte by byte, in whole events, however the network splits them."""

import random

from hypothesis import given
from hypothesis import strategies as st

from quire_gateway import events
from quire_gateway.events import WholeEvents

TEXTS = st.text().map(lambda text: text.replace("\n", "").encode())
STREAMS = st.lists(
    st.tuples(st.sampled_from([b"data: ", b": ", b"event: x\ndata: "]), TEXTS), max_size=20
).map(lambda lines: b"".join(head + text + b"\n\n" for head, text in lines))


def pieces_of(stream, chance):
    edges = sorted(chance.choices(range(len(stream) + 1), k=chance.randint(0, 40)))
    return [stream[a:b] for a, b in zip([0, *edges], [*edges, len(stream)], strict=True) if a < b]


@given(STREAMS, st.binary(max_size=20), st.randoms(use_true_random=False))
def test_every_byte_is_passed_on_in_its_order_and_no_part_of_an_event_before_its_end(stream, rest, chance):
    whole = WholeEvents()
    sent = [whole.add(piece) for piece in pieces_of(stream + rest, chance)]
    assert all(not part or part.endswith(b"\n\n") for part in sent)
    assert b"".join(sent).startswith(stream)
    assert b"".join(sent) + whole.rest() == stream + rest


def test_an_event_is_passed_on_as_soon_as_it_is_whole():
    whole = WholeEvents()
    assert whole.add(b"data: 1\n\nda") == b"data: 1\n\n"
    assert whole.add(b"ta: 2\n") == b""
    assert whole.add(b"\n") == b"data: 2\n\n"


def test_an_event_without_an_end_takes_no_memory_without_bound():
    whole, sent, chance = WholeEvents(), 0, random.Random(1)
    for _ in range(100):
        sent += len(whole.add(chance.randbytes(1 << 16).replace(b"\n", b" ")))
    assert 100 * (1 << 16) - sent <= events._MAX_HELD
