"""`python -m torchshard`: the command line."""

import sys

from torchshard.cli import main

sys.exit(main())
