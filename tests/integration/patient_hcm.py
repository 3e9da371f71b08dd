"""The HCM, for a test that holds back a process while it is asked for its name: on a busy machine that takes longer than a
process has that does not hang."""

from __future__ import annotations

import hcm.host
from hcm.__main__ import main

hcm.host.PING_SECONDS = 60.0

if __name__ == "__main__":
    main()
