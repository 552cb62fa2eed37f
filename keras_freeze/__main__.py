"""The command line: `python -m keras_freeze inspect FILE`."""

import argparse
import io
import sys

from keras_freeze._version import __version__
from keras_freeze.storage.inspection import inspect


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m keras_freeze")
    parser.add_argument("--version", action="version", version=f"keras_freeze {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("inspect", help="describe the content of a .freeze file")
    command.add_argument("file", help="the file")
    arguments = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):  # whose encoding may lack characters of a name
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(inspect(arguments.file))
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        sys.stderr.close()
    except (OSError, ValueError) as error:
        sys.exit(f"keras_freeze: error: {error}")


if __name__ == "__main__":
    main()
