"""What a proxy counts on for its attempts is gone when it is over."""

from __future__ import annotations

from pdserve.wire.discovery import Role
from pdserve.wire.ids import new_id
from pdserve_proxy.records.node_counts import NodeCounts
from pdserve_proxy.registry.registry import Registry
from pdserve_proxy.relay.dispatch import Dispatch, TicketSigner
from pdserve_proxy.routing.attempts import Attempts
from pdserve_proxy.upstream.node_pool import NodePool
from tests.proxy.cluster import SECRET, node_info, proxy_config


async def test_tokens_that_were_expected_leave_nothing_behind() -> None:
    """A node that is started again has another id, so a table with an entry for each would grow for ever."""
    pool = NodePool(connect_timeout_s=1.0, max_connections=1)
    signer = TicketSigner(SECRET, new_id())
    dispatch = Dispatch(proxy_config(), Registry(1.0, 3), Attempts(), signer, pool, NodeCounts())
    for _ in range(3):
        node = node_info("restarted", Role.DECODE)
        come = [dispatch.expect_tokens(tokens, node) for tokens in (100, 200)]
        assert dispatch._coming[node.boot_id] == [100, 200]
        for over in come:
            over()
    assert not dispatch._coming
