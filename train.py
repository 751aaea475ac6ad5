"""`python train.py key=value ...` is `genmodels train key=value ...`; see `python train.py --help`."""

import sys

from genmodels.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
