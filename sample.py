"""`python sample.py key=value ...` is `genmodels sample key=value ...`; see `python sample.py --help`."""

import sys

from genmodels.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["sample", *sys.argv[1:]]))
