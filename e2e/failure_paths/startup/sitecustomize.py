"""Python imports this when it starts, where import_hook.environment has put its folder on the path."""

import os
import sys

sys.path.append(os.path.abspath(os.path.join(__file__, "..", "..", "..", "..")))

from e2e.failure_paths import import_hook

import_hook.install()
