"""`python -m flows.cli` is `onecopy`."""

import sys

from flows.cli import main

sys.exit(main())
