import sys

from megatron_mok.cli import main

sys.exit(main())
