"""`python -m e2e.up`: the command line of `make up`."""

import os
import sys
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.images.errors import ImageError
from e2e.kubectl import KubectlError
from e2e.up import flow
from e2e.up.errors import UpError
from e2e.up.place import Place


def main() -> int:
    """Runs the flow in the current checkout; an error of ours is one message, not a traceback."""
    root = Path.cwd().resolve()
    try:
        flow.run(root, os.environ)
    except (UpError, ImageError, ClusterError, KubectlError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        undo = flow.undo(Place.of(root, os.environ))
        print(f"\ninterrupted: `make up` goes on from here, {undo}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
