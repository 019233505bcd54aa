"""Puts `kubectl-quire` beside the other programs, where kubectl finds it: README's PATH has that folder.

A script and no installed entry point, so that it works before `make setup` and shows every edit at once. The
plugin itself needs no package beyond the operator's.
"""

import sys
from pathlib import Path

from e2e.cluster import Checkout

NAME = "kubectl-quire"


def install(checkout: Checkout) -> None:
    """Writes the script anew: the checkout or its Python may have moved."""
    checkout.bin.mkdir(parents=True, exist_ok=True)
    path = checkout.bin / NAME
    path.write_text(script(Path(sys.executable), checkout.root))
    path.chmod(0o755)


def script(python: Path, root: Path) -> str:
    """The program (pure)."""
    return f"""\
#!{python}
import sys

sys.path.insert(0, {str(root / "operator")!r})
from quire_kubectl.__main__ import main

sys.exit(main())
"""
