"""``python -m pdserve.engine``: the engine process. Its EngineLaunch comes as MessagePack on standard input."""

from __future__ import annotations

import sys

from pdserve.engine.process import main

if __name__ == "__main__":
    sys.exit(main())
