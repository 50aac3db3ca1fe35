from __future__ import annotations

import pytest

from pdserve_kvtransfer.sides import Lease, PingTimer


def test_a_lease_runs_out_without_news() -> None:
    lease = Lease(3.0)
    lease.hold(10.0)
    assert lease.until == 13.0
    assert not lease.expired(12.9)
    assert lease.expired(13.0)


def test_news_renews_it() -> None:
    lease = Lease(3.0)
    lease.hold(10.0)
    lease.renew(12.0)
    assert not lease.expired(14.9)
    assert lease.expired(15.0)


def test_holding_it_again_does_not_renew_it() -> None:
    lease = Lease(3.0)
    lease.hold(10.0)
    lease.hold(12.0)
    assert lease.until == 13.0


def test_a_lease_that_is_not_held_never_runs_out() -> None:
    lease = Lease(3.0)
    lease.renew(1.0)
    lease.shorten(1.0)
    assert lease.until is None and not lease.expired(1e9)
    lease.hold(1.0)
    lease.release()
    assert not lease.expired(1e9)


def test_suspicion_shortens_and_news_clears_it() -> None:
    lease = Lease(3.0)
    lease.hold(10.0)
    lease.shorten(10.5)
    lease.shorten(11.0)
    assert lease.until == 10.5
    lease.renew(10.4)
    assert lease.until == 13.4


def test_time_in_which_nobody_could_be_heard_extends_it_once_over() -> None:
    idle = Lease(3.0)
    idle.extend(1.0)
    assert idle.until is None
    lease = Lease(3.0)
    lease.hold(10.0)
    lease.extend(2.0)
    assert lease.until == 15.0
    lease.extend(2.0)
    assert lease.until == 16.0
    lease.renew(15.0)
    lease.extend(2.0)
    assert lease.until == 20.0


def test_heartbeats_come_at_their_interval_while_running() -> None:
    heartbeat = PingTimer(0.5)
    assert not heartbeat.due(100.0)
    heartbeat.run(1.0)
    heartbeat.run(1.4)
    assert heartbeat.next == 1.5
    assert not heartbeat.due(1.49)
    assert heartbeat.due(1.6)
    assert heartbeat.next == 2.1
    heartbeat.stop()
    assert not heartbeat.due(100.0)


@pytest.mark.parametrize("lease_s", [0.001, 0.0, -1.0])
def test_no_lease_of_a_peer_asks_for_more_than_a_hundred_heartbeats_a_second(lease_s: float) -> None:
    heartbeat = PingTimer(0.5)
    heartbeat.keep(lease_s, 1.0)
    heartbeat.run(1.0)
    assert not heartbeat.due(1.009)
    assert heartbeat.due(1.011)
