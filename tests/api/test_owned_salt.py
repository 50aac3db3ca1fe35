from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.api.routes.completions import owned_salt

OWNERS = st.sampled_from([b"", b"o" * 16, b"p" * 16, bytes(16)])


@given(st.tuples(OWNERS, st.text(max_size=8)), st.tuples(OWNERS, st.text(max_size=8)))
def test_no_client_can_write_the_salt_of_another_owner(one: tuple[bytes, str], other: tuple[bytes, str]) -> None:
    mine = owned_salt(*one)
    assert (mine == owned_salt(*other)) == (one == other)
    for prefix in (mine, "/" + mine, other[0].hex() + "/" + other[1]):
        assert owned_salt(b"", prefix) != mine or one == (b"", prefix)
