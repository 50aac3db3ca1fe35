"""Tests that a link registers its memory once and passes that on with every message.

A small library counts the calls of UCX that the compiled poster makes. It comes before UCX in a process of its
own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.settings import cache_folder
from pdserve_kvtransfer.ucx.ucx_library import loaded_ucx

pytestmark = pytest.mark.integration

MESSAGES = 40
_COUNTER = r"""
#include <dlfcn.h>
#include <stdlib.h>
#include <ucp/api/ucp.h>

extern "C" {
unsigned long counts[7];  // maps, unmaps, bytes, sends, those with a handle, receives, those with a handle

#define REAL(name) reinterpret_cast<decltype(&name)>(dlsym(dlopen("libucp.so.0", RTLD_LAZY | RTLD_NOLOAD), #name))

ucs_status_t ucp_mem_map(ucp_context_h context, const ucp_mem_map_params_t *params, ucp_mem_h *handle) {
    ++counts[0], counts[2] += params->length;
    return getenv("REFUSE_MAPS") ? UCS_ERR_IO_ERROR : REAL(ucp_mem_map)(context, params, handle);
}
ucs_status_t ucp_mem_unmap(ucp_context_h context, ucp_mem_h handle) {
    ++counts[1];
    return REAL(ucp_mem_unmap)(context, handle);
}
ucs_status_ptr_t ucp_tag_send_nbx(ucp_ep_h to, const void *bytes, size_t count, ucp_tag_t tag,
                                  const ucp_request_param_t *param) {
    ++counts[3], counts[4] += (param->op_attr_mask & UCP_OP_ATTR_FIELD_MEMH) != 0;
    return REAL(ucp_tag_send_nbx)(to, bytes, count, tag, param);
}
ucs_status_ptr_t ucp_tag_msg_recv_nbx(ucp_worker_h worker, void *bytes, size_t count, ucp_tag_message_h message,
                                      const ucp_request_param_t *param) {
    ++counts[5], counts[6] += (param->op_attr_mask & UCP_OP_ATTR_FIELD_MEMH) != 0;
    return REAL(ucp_tag_msg_recv_nbx)(worker, bytes, count, message, param);
}
}
"""
_PROGRAM = """
import ctypes, logging, sys
from pathlib import Path
from pdserve.config import UcxCalls
from pdserve_kvtransfer.configuration import chosen_poster
from pdserve_kvtransfer.transport import DISCARD
from pdserve_kvtransfer.ucx.ucx_transport import UcxTransport

logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
cache, messages, size = Path(sys.argv[1]), int(sys.argv[2]), 65_536
poster = chosen_poster(UcxCalls.COMPILED, cache, registers=sys.argv[3] == "on")
transport = UcxTransport("tcp,self", "lo", make_poster=poster)
memories = [memoryview(bytearray(b"%d" % side * (size * messages))) for side in range(2)]
links = [transport.open_link(memory) for memory in memories]
for link, other in (links, links[::-1]):
    link.connect([other.address])
sender, receiver = links
sender.send([size * number for number in range(messages)], size, list(range(messages)))
landed = seen = 0
while landed < messages - 1:
    sender.progress(), receiver.progress()
    arrived = receiver.arrivals()
    # The first one is discarded: it lands in memory that is not the cache's.
    receiver.receive([DISCARD if one.label == 0 else size * one.label for one in arrived])
    landed += len(receiver.landed())
assert bytes(memories[1][size:]) == b"0" * (size * (messages - 1))
for link in links:
    link.close()
print(*(ctypes.c_ulong * 7).in_dll(ctypes.CDLL(None), "counts"))
"""


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counter")
    source, library = folder / "counter.cpp", folder / "counter.so"
    source.write_text(_COUNTER)
    command = ["g++", "-shared", "-fPIC", f"-I{loaded_ucx().include}", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    return library


def counted(counter: Path, *, registers: str = "on", **environ: str) -> tuple[list[int], str]:
    """Returns the counts of one process that moves messages between two links, and what it logs."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(cache_folder(os.environ)), str(MESSAGES), registers],
        env={**os.environ, "LD_PRELOAD": str(counter), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *logged, counts = done.stdout.splitlines()
    return [int(count) for count in counts.split()], "\n".join(logged)


def test_a_link_registers_its_memory_once_and_passes_it_on(counter: Path) -> None:
    (maps, unmaps, nbytes, sends, with_handle, receives, into_handle), logged = counted(counter)
    assert (maps, unmaps, nbytes) == (2, 2, 2 * MESSAGES * 65_536), "one for each of two links, the whole memory"
    assert sends == with_handle == MESSAGES
    assert (receives, into_handle) == (MESSAGES, MESSAGES - 1), "all but the discarded one"
    assert not logged


def test_without_it_blocks_move_too(counter: Path) -> None:
    assert counted(counter, registers="off") == ([0, 0, 0, MESSAGES, 0, MESSAGES, 0], "")
    (maps, unmaps, _, *operations), logged = counted(counter, REFUSE_MAPS="1")
    assert (maps, unmaps, operations) == (2, 0, [MESSAGES, 0, MESSAGES, 0])
    assert "cannot register" in logged and "ulimit -l" in logged
