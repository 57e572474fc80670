"""The command `hf-tiny`."""

from hf_tiny.cli import main as main
