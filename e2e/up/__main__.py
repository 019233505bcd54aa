"""`python -m e2e.up`: the command line of `make up`."""

import os
import sys
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.images.errors import ImageError
from e2e.kubectl import KubectlError
from e2e.up import flow
from e2e.up.errors import UpError


def main() -> int:
    """Runs the flow in the current checkout; an error of ours is one message, not a traceback."""
    try:
        flow.run(Path.cwd().resolve(), os.environ)
    except (UpError, ImageError, ClusterError, KubectlError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
