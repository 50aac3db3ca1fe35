"""Fixtures of the tests of answers that go on elsewhere: those of the relay."""

from tests.proxy.relay.conftest import silent_clients_are_looked_for_soon

__all__ = ["silent_clients_are_looked_for_soon"]
