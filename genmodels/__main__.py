"""`python -m genmodels` is `genmodels`."""

import sys

from genmodels.cli.main import main

sys.exit(main())
