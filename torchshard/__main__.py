"""`python -m torchshard`: the command line."""

import sys

from torchshard.cli.main import main

sys.exit(main())
