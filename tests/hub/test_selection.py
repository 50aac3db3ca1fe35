"""Tests which files of a repository are served."""

from __future__ import annotations

import pytest

from pdserve.errors import ModelError
from pdserve.hub.selection import HubName, label_of, select

NAME = HubName("org/name")
FOLDER = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
OTHERS = {"README.md", ".gitattributes", "onnx/model.onnx", "pytorch_model.bin", "original/model.safetensors", "a.png"}


def test_a_folder_of_safetensors_and_no_more() -> None:
    found = select(NAME, FOLDER | OTHERS | {"model.safetensors", "original/params.json"})
    assert set(found.settings) == FOLDER
    assert found.weights == ("model.safetensors",)


def test_the_index_is_among_the_settings_and_says_which_weights_are_read() -> None:
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    found = select(NAME, FOLDER | shards | {"model.safetensors.index.json", "consolidated.safetensors"})
    assert "model.safetensors.index.json" in found.settings
    assert shards < set(found.weights)


@pytest.mark.parametrize(
    ("file", "label"),
    [
        ("Model-Q4_K_M.gguf", "Q4_K_M"),
        ("model.q8_0.gguf", "Q8_0"),
        ("Model-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
        ("Model-BF16-00001-of-00002.gguf", "BF16"),
        ("Q6_K/model-Q6_K.gguf", "Q6_K"),
        ("model.gguf", ""),
        ("mmproj-F16.gguf", ""),
        ("README.md", ""),
    ],
)
def test_the_label_of_a_quantisation(file: str, label: str) -> None:
    assert label_of(file) == label


def test_the_one_gguf_file_that_is_meant() -> None:
    files = {"m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf", "README.md"}
    assert select(HubName("org/name", quantisation="q8_0"), files).weights == ("m-Q8_0.gguf",)
    assert select(HubName("org/name", file="m-Q4_K_M.gguf"), files).weights == ("m-Q4_K_M.gguf",)
    assert select(NAME, {"m-Q4_K_M.gguf", "mmproj-F16.gguf"}).gguf == "m-Q4_K_M.gguf"


@pytest.mark.parametrize(
    "name",
    [
        HubName("org/name", quantisation="F16"),
        HubName("org/name", file="F16/m-F16-00001-of-00002.gguf"),
        HubName("org/name", file="F16/m-F16-00002-of-00002.gguf"),
    ],
)
def test_a_gguf_file_in_parts_is_taken_with_all_of_them(name: HubName) -> None:
    parts = ("F16/m-F16-00001-of-00002.gguf", "F16/m-F16-00002-of-00002.gguf")
    found = select(name, {*parts, "m-Q8_0.gguf"})
    assert found.weights == parts
    assert found.gguf == parts[0]
    assert select(NAME, set(parts)).weights == parts


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        (
            NAME,
            {"m-Q4_K_M.gguf", "m-Q8_0.gguf"},
            "several GGUF files; say which one as org/name:QUANTISATION, of Q4_K_M",
        ),
        (NAME, {"a.gguf", "b.gguf"}, "several GGUF files; name one of them: org/name/a.gguf, org/name/b.gguf"),
        (HubName("org/name", quantisation="Q5_K"), {"m-Q8_0.gguf"}, "no GGUF file of quantisation Q5_K; .* of Q8_0"),
        (HubName("org/name", quantisation="Q5_K"), {"x.bin"}, "it has no other GGUF file"),
        (HubName("org/name", file="x.gguf"), {"y.gguf"}, "no file x.gguf; it has org/name/y.gguf"),
        (
            HubName("org/name", quantisation="F16"),
            {"m-F16-00002-of-00003.gguf", "m-F16-00001-of-00003.gguf", "m-Q8_0.gguf"},
            "org/name:F16 is in 3 parts, and org/name lacks m-F16-00003-of-00003.gguf",
        ),
        (NAME, FOLDER | {"pytorch_model.bin"}, r"pickled files only \(pytorch_model.bin\)"),
        (NAME, FOLDER | {"model.onnx", "tf_model.h5"}, "weights in .h5, .onnx only"),
        (NAME, {"README.md"}, "no weights"),
        (NAME, {"config.json", "unet/model.safetensors"}, "folders of its own only"),
        (NAME, {"adapter_config.json", "adapter_model.safetensors"}, "an adapter"),
        (NAME, {"model.safetensors"}, "no config.json"),
        (NAME, {"config.json", "model.safetensors"}, "no tokeniser in tokenizer.json, tekken.json, tokenizer.model or"),
    ],
)
def test_what_cannot_be_served_is_said_with_a_way_out(name: HubName, files: set[str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        select(name, files)


def test_paths_that_leave_the_folder_are_not_taken() -> None:
    found = select(NAME, FOLDER | {"../evil.json", "model.safetensors"})
    assert all(".." not in path for path in found.settings)
