"""Tests which texts are names of the hub, and what they mean."""

from __future__ import annotations

import pytest

from pdserve.errors import ModelError
from pdserve.hub.selection import HubName, hub_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/name:Q4_K_M", HubName("org/name", quantisation="Q4_K_M")),
        ("org/name:Q4_K_M@v1", HubName("org/name", "v1", quantisation="Q4_K_M")),
        ("org/name@v1:Q4_K_M", HubName("org/name", "v1", quantisation="Q4_K_M")),
        ("org/name/file.gguf", HubName("org/name", file="file.gguf")),
        ("hf.co/org/name:Q4_K_M", HubName("org/name", quantisation="Q4_K_M")),
        ("https://huggingface.co/org/name", HubName("org/name")),
        ("org/name/folder/file.gguf@v1", HubName("org/name", "v1", file="folder/file.gguf")),
    ],
)
def test_a_name_of_the_hub(text: str, name: HubName) -> None:
    assert hub_name(text) == name
    assert hub_name(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        *("demo", "name", "/org/name", "./org/name", "~/name", "../name", "a/b/c", "org/..", "org/name/../x.gguf", ""),
        *("org/name@../x", "org//name", "org/name/", "https://huggingface.co/org", "file.gguf", "org/a b", "org/name:"),
    ],
)
def test_what_can_only_be_a_path(text: str) -> None:
    assert hub_name(text) is None


def test_clients_use_the_name_without_the_revision() -> None:
    assert HubName("org/name", "v1").served == "org/name"
    assert HubName("org/name", "v1", quantisation="Q4_K_M").served == "org/name:Q4_K_M"
    assert HubName("org/name", "v1", file="a/b.gguf").served == "org/name/a/b.gguf"


def test_a_file_and_a_quantisation_are_one_too_many() -> None:
    with pytest.raises(ModelError, match="says twice which file is meant"):
        hub_name("org/name/file.gguf@v1:Q4_K_M")
