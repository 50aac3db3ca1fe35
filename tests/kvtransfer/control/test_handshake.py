from __future__ import annotations

import threading
import time

import msgspec
import pytest

from pdserve.errors import HandshakeRefused, PeerLost
from pdserve.wire.cache_groups import GroupSpec, Keep
from pdserve.wire.ids import new_id
from pdserve.wire.transfer import Hello, PrefillRequest, Refused, Welcome
from pdserve_kvtransfer.control.handshake import Handshake, answer, misfit
from tests.kvtransfer.fakes import FakePrefill
from tests.kvtransfer.rig import PATIENT, SPEC, Pair, engine

OURS, THEIRS = new_id(), new_id()


@pytest.fixture
def handshake() -> Handshake:
    return Handshake(OURS, SPEC, THEIRS)


def test_equal_engines_fit() -> None:
    assert misfit(SPEC, SPEC) is None
    assert answer(Hello(THEIRS, SPEC, [b"address"]), OURS, SPEC) is None


def test_the_first_difference_is_named() -> None:
    other = msgspec.structs.replace(SPEC, dtype="fp32", head_dim=16)
    assert answer(Hello(THEIRS, other, [b"address"]), OURS, SPEC) == Refused(OURS, "dtype", "bf16", "fp32")


@pytest.mark.parametrize("addresses", [[], [b"a", b"b"]])
def test_addresses_must_be_one_for_each_rank(addresses: list[bytes]) -> None:
    refusal = answer(Hello(THEIRS, SPEC, addresses), OURS, SPEC)
    assert refusal == Refused(OURS, "rank_addresses", "1 by tp_size", str(len(addresses)))


@pytest.mark.parametrize("ranks", [1, 3, 6])
def test_other_numbers_of_ranks_fit(ranks: int) -> None:
    other = msgspec.structs.replace(SPEC, tp_size=ranks)
    assert answer(Hello(THEIRS, other, [b"address"] * ranks), OURS, SPEC) is None


def test_ranks_that_cannot_share_the_heads_do_not_fit() -> None:
    other = msgspec.structs.replace(SPEC, tp_size=2)
    assert answer(Hello(THEIRS, other, [b"a", b"b"]), OURS, SPEC) == Refused(OURS, "tp_size", "1", "2")


def test_a_welcome_gives_the_address_once(handshake: Handshake) -> None:
    assert handshake.hello([b"address"]) == Hello(OURS, SPEC, [b"address"])
    welcome = Welcome(THEIRS, SPEC, [b"there"])
    assert handshake.on_welcome(welcome) == (b"there",)
    assert handshake.complete
    assert handshake.on_welcome(welcome) is None


def test_another_boot_is_not_who_was_meant(handshake: Handshake) -> None:
    with pytest.raises(PeerLost, match="restarted"):
        handshake.on_welcome(Welcome(new_id(), SPEC, [b"there"]))
    assert not handshake.complete


def test_a_welcome_is_not_trusted_to_have_compared(handshake: Handshake) -> None:
    with pytest.raises(HandshakeRefused, match="kv_heads is 3 here and 4 there"):
        handshake.on_welcome(Welcome(THEIRS, msgspec.structs.replace(SPEC, kv_heads=4), [b"there"]))
    with pytest.raises(HandshakeRefused, match="rank_addresses"):
        handshake.on_welcome(Welcome(THEIRS, SPEC, []))


def test_a_refusal_is_told_from_this_sides_view(handshake: Handshake) -> None:
    refusal = handshake.refused(Refused(THEIRS, "dtype", "fp32", "bf16"))
    assert isinstance(refusal, HandshakeRefused)
    assert (refusal.field, refusal.ours, refusal.theirs) == ("dtype", "bf16", "fp32")


def test_a_refusal_after_the_welcome_is_a_lost_handshake(handshake: Handshake) -> None:
    handshake.on_welcome(Welcome(THEIRS, SPEC, [b"there"]))
    assert isinstance(handshake.refused(Refused(THEIRS, "handshake", "none", "assumed")), PeerLost)


def test_a_greeting_that_was_dropped_is_no_misfit(handshake: Handshake) -> None:
    assert isinstance(handshake.refused(Refused(THEIRS, "handshake", "none", "assumed")), PeerLost)


def test_waiting_for_a_handshake_costs_no_cpu() -> None:
    with FakePrefill() as silent, engine(config=PATIENT) as decode:
        decode.thread.fetch(Pair(decode, decode).order((0,), target=silent.target))
        hello = silent.next(Hello)
        start, used = time.monotonic(), time.process_time()
        assert not threading.Event().wait(0.5)
        assert time.process_time() - used < 0.1 * (time.monotonic() - start)
        assert decode.quiet()
        silent.link.connect(hello.rank_addresses)
        silent.send(Welcome(silent.boot_id, SPEC, [silent.link.address]))
        silent.next(PrefillRequest)


WINDOW = GroupSpec("window 128", Keep.WINDOW, 4, 2, 512, "bf16", 128)
GROUPS = (GroupSpec("all", Keep.ALL, 2, 3, 1024, "bf16"), WINDOW)


def groups_refused(*theirs: GroupSpec, ranks: int = 1) -> str:
    ours = msgspec.structs.replace(SPEC, groups=GROUPS)
    hello = Hello(THEIRS, msgspec.structs.replace(SPEC, groups=theirs, tp_size=ranks), [b"address"] * ranks)
    refused = answer(hello, OURS, ours)
    assert refused is not None
    return f"{refused.field} is {refused.ours} here and {refused.theirs} there"


def test_a_misfit_of_cache_groups_names_the_group_and_what_differs() -> None:
    wider = msgspec.structs.replace(WINDOW, window=64)
    assert groups_refused(GROUPS[0], wider) == "cache group 'window 128': window is 128 here and 64 there"
    whole = msgspec.structs.replace(WINDOW, keep=Keep.ALL)
    assert groups_refused(GROUPS[0], whole) == "cache group 'window 128': keep is window here and all there"
    assert groups_refused(GROUPS[0]) == "cache groups is all, window 128 here and all there"
    # An older engine knows of no groups.
    assert groups_refused() == "cache groups is all, window 128 here and one there"
    assert groups_refused(*GROUPS, ranks=3) == "cache group 'window 128': tp_size is 1 here and 3 there"


def test_a_model_of_one_cache_group_says_nothing_of_groups_so_that_older_engines_fit() -> None:
    assert b"groups" not in msgspec.msgpack.encode(SPEC)
