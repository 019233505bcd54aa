"""Long texts are tokenised by a child process, with the same result and within limits; others beside the
event loop's thread.
"""

import os
import threading
import time
from pathlib import Path

import pytest

from quire_server.errors import RequestError
from quire_server.text.long_texts import LongTexts
from quire_server.text.tokenizer import Tokenizer

TEXT = "Once upon a time \N{GRINNING FACE} <|im_start|> " * 5000


@pytest.fixture
def long_texts(tiny):
    texts = LongTexts(tiny)
    yield texts
    texts.close()


def test_a_child_gives_the_same_tokens(tiny, long_texts):
    expected = Tokenizer.load(tiny).encode(TEXT)
    assert long_texts.encode(TEXT, add_special_tokens=True, limit=len(expected)) == tuple(expected)


def test_beyond_the_limit_only_the_number_of_tokens_comes_back(long_texts):
    assert long_texts.encode("x" * 300_000, add_special_tokens=True, limit=10) == 300_000


def test_a_text_that_takes_too_much_is_refused_and_the_next_one_is_tokenised(long_texts):
    with pytest.raises(RequestError, match="too long, or too much memory"):
        long_texts.encode("x" * 40_000_000, add_special_tokens=True, limit=10)
    assert long_texts.encode("next", add_special_tokens=True, limit=10) == tuple(b - 33 for b in b"next")


def test_the_child_gives_way_to_every_other_process(long_texts):
    long_texts.encode("x", add_special_tokens=True, limit=10)
    pid = long_texts._worker._process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) >= os.getpriority(os.PRIO_PROCESS, 0) + 10
    status = Path(f"/proc/{pid}/limits").read_text()
    assert "unlimited" not in next(line for line in status.splitlines() if "address space" in line)


def test_while_a_thread_tokenises_another_one_runs(tiny):
    tokenizer, over, gaps = Tokenizer.load(tiny), threading.Event(), []

    def watch():
        last = time.perf_counter()
        while not over.wait(0.001):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.perf_counter()
    for _ in range(3):
        tokenizer.encode("word " * 100_000)
    seconds = time.perf_counter() - begun
    over.set()
    watcher.join()
    assert max(gaps) < seconds / 6, "one text held the interpreter's lock until its end"
