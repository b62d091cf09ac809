"""`python -m calibration.live`: see `calibration.live.run`."""

import sys

from calibration.live.run import main

sys.exit(main())
