"""A vocabulary of every byte and some longer tokens."""

import numpy as np

from quire_server.core.sampling_params import GrammarKind
from quire_server.text import grammar

PIECES = [b"ab", b"ba", b"aa", b'{"', b'":', b'"}', b"12", b"\xc3\xa9", b"\xf0\x9f", b"yes"]
TOKENS = [bytes([byte]) for byte in range(256)] + PIECES + [b"<|special|>", b"", b""]
EOS = len(TOKENS) - 2
SPECIAL = TOKENS.index(b"<|special|>")
VOCABULARY = grammar.Vocabulary(TOKENS, [SPECIAL, EOS], [EOS])
TOKENIZER = VOCABULARY.tokenizer()


def matcher(kind, text):
    """A matcher of the library for a client's text."""
    return grammar.matcher(TOKENIZER, grammar.compiled(GrammarKind(kind), text))


def accepts(kind, text, answer):
    """Whether the answer, byte by byte, is a whole one."""
    one = matcher(kind, text)
    data = list(answer.encode())
    return one.try_consume_tokens(data) == len(data) and one.is_accepting()


def allowed(library):
    """Token ids that the matcher allows next."""
    mask = np.zeros(-(-len(TOKENS) // 32), np.uint32)
    library.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
