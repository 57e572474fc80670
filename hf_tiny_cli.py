"""The command `hf-tiny`: runs hf_tiny/cli.py without importing hf_tiny, which takes seconds, so that help comes at once."""

import runpy
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    runpy.run_path(str(Path(find_spec("hf_tiny").origin).with_name("cli.py")), run_name="__main__")
