"""Tests that the limit is raised as far as a benchmark needs, or that an error comes before the benchmark begins."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from pdserve.errors import PdserveError
from pdserve.process import allow_open_files


@pytest.fixture
def few() -> Iterator[int]:
    """Sets a low limit, and yields how far this process may raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, soft), hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_is_raised(few: int) -> None:
    allow_open_files(400)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 600


def test_more_than_the_system_allows_is_an_error_before_anything_begins(few: int) -> None:
    with pytest.raises(PdserveError, match=f"the system allows {few}"):
        allow_open_files(few)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 512
