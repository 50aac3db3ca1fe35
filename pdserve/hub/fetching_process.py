"""The process that fetches one model: ``python -m pdserve.hub.fetching_process ORDER``. It writes messages as lines.

It is a process of its own because huggingface_hub, and the check of some models, take memory that a node would keep.
"""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

import msgspec

from pdserve.errors import HubError, ModelError
from pdserve.hub.download import DownloadFailed, DownloadOrder, Message
from pdserve.hub.names import hub_name
from pdserve.process import die_with_parent

_writing = threading.Lock()


def tell(message: Message) -> None:
    with _writing:
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()


def main(order: DownloadOrder) -> int:
    """Fetches the model, and says what becomes of it. Returns the exit status."""
    from pdserve.hub.preparing import Preparation

    name = hub_name(order.model)
    if name is None:
        raise ValueError(f"{order.model!r} is no name of the hub")
    try:
        tell(Preparation(name, Path(order.cache), tell).run(newest=order.newest))
    except (ModelError, HubError) as error:
        tell(DownloadFailed(str(error), passing=isinstance(error, HubError)))
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent()
    # The engine, which reads the same files, says what is to be said of them.
    logging.disable(logging.WARNING)
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=DownloadOrder)))
