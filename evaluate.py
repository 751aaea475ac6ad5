"""`python evaluate.py key=value ...` is `genmodels evaluate key=value ...`; see `python evaluate.py --help`."""

import sys

from genmodels.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
