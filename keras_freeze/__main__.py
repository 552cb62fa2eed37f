"""`python -m keras_freeze`: the command line."""

import sys

from keras_freeze.command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
