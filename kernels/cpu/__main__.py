import sys

from kernels.cpu.build import main

sys.exit(main())
