"""A child process that calls the tokenizers library itself, whose panics nothing catches on the way."""

from pathlib import Path

import tokenizers

from quire_server.text import child_loop


def prepare(setup):
    library = tokenizers.Tokenizer.from_str((Path(setup["model"]) / "tokenizer.json").read_text())
    return lambda request: {"tokens": len(library.encode(request["text"]).ids)}


if __name__ == "__main__":
    child_loop.serve(prepare)
