"""The command line: `quire-server serve MODEL`, `quire-server import-gguf FILE OUT_DIR`, `quire-server
detect-watermark`, `quire-server draft-alignment --model DIR --draft DIR TEXT_FILE`, `quire-server fetch`,
`quire-server fetch-adapters`, `quire-server quantize`, `quire-server eval-quality`, `quire-server --version`.

Selects the command and converts its errors into exit codes. Imports little, because `serve` becomes pid 1.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from quire_server import __version__, config, log, termination
from quire_server.errors import ConfigError, QuireServerError
from quire_server.supervisor import main as supervisor
from quire_server.supervisor import open_files
from quire_server.termination import Failure, Reason

_USAGE = """\
usage: quire-server serve MODEL [flags]            serve a model (quire-server serve --help lists the flags)
       quire-server fetch SOURCE --to DIR          download a model (hf://, s3://, gs://, oci://)
       quire-server fetch-adapters --list FILE --to DIR
                                                   keep a directory of LoRA adapters as a list says
       quire-server import-gguf FILE OUT_DIR       convert a GGUF file into a model directory
       quire-server quantize MODEL --scheme SCHEME --calibration FILE --output DIR
                                                   write a smaller model (fp8, int8, awq, gptq)
       quire-server eval-quality MODEL --against ORIGINAL --text FILE
                                                   perplexity and agreement with the original
       quire-server detect-watermark --help        say whether a text carries a watermark
       quire-server draft-alignment --model DIR --draft DIR TEXT_FILE
                                                   how often a draft model would be right
       quire-server --version
"""


def main() -> None:
    """The entry point of the `quire-server` program."""
    sys.exit(run(sys.argv[1:], os.environ))


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one command; returns the exit code."""
    match argv:
        case ["serve", *arguments]:
            return _serve(arguments, environ)
        case ["fetch", *arguments]:
            # Imported by name: it needs HTTP clients, which pid 1 of a server must not load.
            downloader = importlib.import_module("quire_server.fetch.command")
            return int(downloader.run(arguments, environ))
        case ["fetch-adapters", *arguments]:
            sidecar = importlib.import_module("quire_server.fetch.adapter_sidecar")  # no part of a server
            return int(sidecar.run(arguments, environ))
        case ["import-gguf", file, out_dir]:
            # As above: it needs torch.
            importer = importlib.import_module("quire_server.models.import_gguf")
            return _finished(lambda: importer.run(Path(file), Path(out_dir)))
        case ["quantize", *arguments]:
            command = importlib.import_module("quire_server.quantize.command")  # as above
            return _finished(lambda: command.quantize(arguments))
        case ["eval-quality", *arguments]:
            command = importlib.import_module("quire_server.quantize.command")
            return _finished(lambda: command.eval_quality(arguments))
        case ["detect-watermark", *arguments]:
            detector = importlib.import_module("quire_server.text.detect_watermark")
            return _finished(lambda: detector.main(arguments))
        case ["draft-alignment", "--model", model, "--draft", draft, text_file]:
            return _draft_alignment(Path(model), Path(draft), Path(text_file))
        case ["--version"]:
            sys.stdout.write(f"quire-server {__version__}\n")
            return 0
        case ["--help" | "-h"]:
            sys.stdout.write(_USAGE)
            return 0
    sys.stderr.write(_USAGE)
    return termination.EXIT_CODES[Reason.CONFIG_ERROR]


def _finished(work: Callable[[], None]) -> int:
    """Run a command that is not a server; returns its exit code."""
    try:
        work()
    except QuireServerError as error:
        sys.stderr.write(f"quire-server: {error}\n")
        return termination.failure_of(error).exit_code
    return 0


def _draft_alignment(model: Path, draft: Path, text_file: Path) -> int:
    alignment = importlib.import_module("quire_server.evaluate.draft_alignment")  # as above
    try:
        alignment.run(model, draft, text_file, sys.stdout.write)
    except QuireServerError as error:
        sys.stderr.write(f"quire-server: {error}\n")
        return termination.failure_of(error).exit_code
    return 0


def _serve(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    try:
        settings = config.parse_args(arguments, environ)
        open_files.ensure_open_files()
    except ConfigError as error:
        failure = Failure(Reason.CONFIG_ERROR, str(error))
        log_path = environ.get("QUIRE_TERMINATION_LOG", config.ServeConfig.termination_log)
        termination.write_termination_log(Path(log_path), failure)
        sys.stderr.write(f"quire-server: {failure.message}\n")
        return failure.exit_code
    log.configure("supervisor", settings.log_level)
    return supervisor.serve(settings, arguments, environ)


if __name__ == "__main__":
    main()
