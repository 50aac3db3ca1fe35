"""Tests of the names that settings had before, and of the flags that users of other servers type."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.config import ChatConfig, Dtype, NodeConfig, Switch, UpConfig
from pdserve.config.bench import BenchLoadConfig
from pdserve.errors import ConfigError
from pdserve.settings import load, with_current_names
from pdserve.settings.other_servers import MEANINGS, SHORT, Understood, own_words
from pdserve.settings.setting import from_texts, settings_of
from pdserve.settings.sources import _warn_of

SETTINGS = {setting.flag: setting for setting in settings_of(NodeConfig)}


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> None:
    _warn_of.cache_clear()


def node(*argv: str, **environ: str) -> NodeConfig:
    return load(NodeConfig, argv, environ, prog="pdserve decode")


@pytest.mark.parametrize(
    ("former", "name", "text"),
    [
        ("served-name", "served-model-name", "mine"),
        ("max-running", "max-num-seqs", "8"),
        ("max-step-tokens", "max-num-batched-tokens", "512"),
    ],
)
def test_a_former_name_is_taken_everywhere_with_one_warning(
    former: str, name: str, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new = node(f"--{name}", text)
    assert node(f"--{former}", text) == node(f"--{former}={text}") == new
    assert [record.getMessage() for record in caplog.records] == [
        f"--{former} is called --{name} now; the old name goes with the next version"
    ]
    caplog.clear()
    old_variable, variable = (f"PDSERVE_{flag.upper().replace('-', '_')}" for flag in (former, name))
    assert node(**{old_variable: text}) == new
    assert with_current_names({old_variable: text}) == {variable: text}
    assert f"{old_variable} is called {variable} now" in caplog.records[0].getMessage()
    assert len(caplog.records) == 1
    caplog.clear()
    section = SETTINGS[name].section
    file = tmp_path / "settings.toml"
    file.write_text(f"[{section}]\n{former} = {text if text.isdecimal() else repr(text)}\n")
    assert node("--config", str(file)) == new
    assert f"{section}.{former} is called {section}.{name} now" in caplog.records[0].getMessage()


def test_two_names_of_one_setting_in_one_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PDSERVE_MAX_NUM_SEQS is given twice: PDSERVE_MAX_RUNNING is its old name"):
        node(PDSERVE_MAX_RUNNING="4", PDSERVE_MAX_NUM_SEQS="8")
    file = tmp_path / "settings.toml"
    file.write_text("[scheduler]\nmax-running = 4\nmax-num-seqs = 8\n")
    with pytest.raises(ConfigError, match=r"scheduler\.max-num-seqs is given twice"):
        node("--config", str(file))


def test_a_flag_wins_over_a_variable_of_the_former_name() -> None:
    assert node("--max-num-seqs", "4", PDSERVE_MAX_RUNNING="8").scheduler.max_num_seqs == 4


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--tp", "-tp", "--tp-size", "--tensor_parallel_size"])
def test_the_number_of_ranks_has_the_names_that_people_type(flag: str, caplog: pytest.LogCaptureFixture) -> None:
    if flag.count("_"):
        # Underscores are taken in the flags of other servers only, and this one is ours.
        with pytest.raises(ConfigError, match=r"did you mean --tensor-parallel-size\?"):
            node(flag, "2")
        return
    assert node(flag, "2").parallel.tensor_parallel_size == 2
    assert not caplog.records
    assert node(PDSERVE_TP="2").parallel.tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("auto", Dtype.BF16), ("bf16", Dtype.BF16), ("bfloat16", Dtype.BF16), ("fp32", Dtype.FP32), ("float", Dtype.FP32)],
)
def test_number_formats_have_everybodys_names(text: str, dtype: Dtype) -> None:
    assert node("--dtype", text).model.dtype is dtype


def test_flags_without_values_mean_values() -> None:
    config = node("--no-enable-prefix-caching", "--enforce-eager", "--enable-chunked-prefill", "--block-size", "8")
    assert config.cache.prefix_cache is Switch.OFF
    assert config.model.cuda_graphs is Switch.OFF
    assert config.cache.block_size == 8


def test_every_understood_flag_means_a_setting_that_takes_its_value() -> None:
    known = {setting.flag: setting for root in (NodeConfig, UpConfig, ChatConfig) for setting in settings_of(root)}
    elsewhere = {"tls-cert", "tls-key"}
    for flag, meaning in MEANINGS.items():
        assert flag not in known, f"--{flag} is a setting of our own"
        if isinstance(meaning, Understood) and meaning.flag not in elsewhere:
            setting = known[meaning.flag]
            if meaning.value:
                from_texts(setting, [meaning.value], flag)


def test_llama_cpps_flags_mean_what_they_mean_there() -> None:
    config = node("-m", "x.gguf", "-c", "4096", "-np", "4", "-ub", "512", "-a", "mine", "--jinja", "--metrics")
    assert (config.model.path, config.model.max_model_len, config.model.served_model_name) == ("x.gguf", 4096, "mine")
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (4, 512)
    assert node("-hf", "org/name:Q4_K_M", "--ctx-size=512") == node("--model", "org/name:Q4_K_M", "-c=512")
    chat = load(ChatConfig, ["-sys", "Be brief.", "-n", "5", "--temp", "0", "-p", "Why?"], {}, prog="pdserve chat")
    assert (chat.talk.system, chat.talk.max_tokens, chat.talk.temperature) == ("Be brief.", 5, 0)
    assert chat.cluster.ask == "Why?"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-ngl", "99"], "-ngl is not a setting of pdserve: .*--device cuda"),
        (["--n-gpu-layers", "99"], "--device cuda or --device cpu"),
        (["-t", "8"], "--cores"),
        (["-fa", "on"], "one kind of attention kernel"),
        (["--revision", "main"], "org/name@REVISION"),
        (["--temp", "0"], "--temperature is not a setting of 'pdserve decode': 'pdserve chat' takes it"),
        (["-v"], "--verbose is not a setting of 'pdserve decode'"),
    ],
)
def test_what_there_is_not_is_refused_with_what_is_right(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        node(*argv)


def test_every_short_flag_stands_for_one_that_is_known() -> None:
    known = {setting.flag for root in (NodeConfig, UpConfig, ChatConfig) for setting in settings_of(root)}
    assert set(SHORT.values()) <= known | set(MEANINGS)


@pytest.mark.parametrize("flag", ["--enable-prefix-caching=false", "--enforce-eager=False", "--enable-metrics=no"])
def test_a_flag_without_a_value_refuses_one(flag: str) -> None:
    with pytest.raises(ConfigError, match="takes no value"):
        node(flag)


def test_a_subcommands_own_flag_means_what_it_means_there() -> None:
    assert load(BenchLoadConfig, ["--seed", "7"], {}, prog="pdserve bench load").load.seed == 7
    with pytest.raises(ConfigError, match="requests have a seed"):
        node("--seed", "7")


def test_a_benchmark_takes_a_former_name_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[load]\nserved_name = 'mine'\n")
    assert load(BenchLoadConfig, ["--config", str(file)], {}, prog="pdserve bench load").load.model == "mine"


def test_what_stands_after_a_flag_of_another_server_stays() -> None:
    assert own_words(["--model-path", "--odd", "--context-length=5"]) == ["--model", "--odd", "--max-model-len=5"]
