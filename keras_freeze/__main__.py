"""The command line: `python -m keras_freeze inspect FILE`."""

import argparse
import sys

from keras_freeze.storage import inspect


def main() -> None:
    """Prints what is in a `.freeze` file."""
    parser = argparse.ArgumentParser(prog="python -m keras_freeze")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("inspect", help="print what is in a .freeze file")
    command.add_argument("file", help="the file")
    arguments = parser.parse_args()
    try:
        print(inspect(arguments.file))
    except (OSError, ValueError) as error:
        sys.exit(f"keras_freeze: error: {error}")


if __name__ == "__main__":
    main()
