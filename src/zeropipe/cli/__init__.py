"""The command line. Each command imports what it uses, so that `zeropipe list` starts in a blink."""

from zeropipe.cli.main import main

__all__ = ["main"]
