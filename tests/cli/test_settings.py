"""Tests where settings come from, which source wins, and what each mistake is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.config import ChatConfig, DoctorConfig, Dtype, LogLevel, NodeConfig, ProxyConfig, UpConfig
from pdserve.errors import ConfigError
from pdserve.settings import ROOTS, load, to_environ
from pdserve.settings.load import load_with_file
from pdserve.settings.setting import settings_of


def node(*argv: str, **environ: str) -> NodeConfig:
    return load(NodeConfig, argv, environ, prog="pdserve decode")


def toml(folder: Path, text: str) -> str:
    path = folder / "pdserve.toml"
    path.write_text(text)
    return str(path)


def test_defaults_are_the_trees_own() -> None:
    assert node() == NodeConfig()
    assert load(ProxyConfig, [], {}, prog="pdserve proxy") == ProxyConfig()
    assert load(ProxyConfig, [], {}, prog="pdserve proxy").http.port == 8000
    assert node().http.port == 0


def test_a_root_keeps_its_own_default_beside_a_given_value() -> None:
    config = load(ProxyConfig, ["--host", "0.0.0.0"], {}, prog="pdserve proxy")
    assert (config.http.host, config.http.port) == ("0.0.0.0", 8000)


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "[cache]\nblock-size = 32\nkv_cache_mib = 7\n[scheduler]\nmax_running = 5\n")
    config = node("--block-size", "64", "--config", file, PDSERVE_BLOCK_SIZE="8", PDSERVE_KV_CACHE_MIB="9")
    assert config.cache.block_size == 64
    assert config.cache.kv_cache_mib == 9
    assert config.scheduler.max_num_seqs == 5
    assert config.scheduler.max_num_batched_tokens == NodeConfig().scheduler.max_num_batched_tokens


def test_the_flag_names_the_file_before_the_environment_does(tmp_path: Path) -> None:
    file = toml(tmp_path, "[cache]\nblock_size = 32\n")
    assert node(PDSERVE_CONFIG=file).cache.block_size == 32
    config, used = load_with_file(
        NodeConfig, ["--config", file], {"PDSERVE_CONFIG": "/nowhere.toml"}, prog="pdserve decode"
    )
    assert (config.cache.block_size, used) == (32, file)


def test_every_type(tmp_path: Path) -> None:
    config = node(
        *("--dtype", "fp32", "--request-timeout-s", "2.5", "--cores", "0,2,4-6", "--log-level=debug"),
        *("--proxy", "tcp://a:1", "--proxy", "tcp://b:2,tcp://c:3"),
    )
    assert config.model.dtype is Dtype.FP32
    assert config.log.level is LogLevel.DEBUG
    assert config.request.timeout_s == 2.5
    assert config.cpu.cores == (0, 2, 4, 5, 6)
    assert config.discovery.proxies == ("tcp://a:1", "tcp://b:2", "tcp://c:3")
    file = toml(
        tmp_path,
        '[model]\ndtype = "fp32"\n[request]\nrequest-timeout-s = 3\n[cpu]\ncores = [1, 2]\n'
        '[discovery]\nproxy = ["tcp://a:1"]\n[log]\nlog_level = "error"\n',
    )
    config = node("--config", file)
    assert config.model.dtype is Dtype.FP32
    assert (config.request.timeout_s, type(config.request.timeout_s)) == (3.0, float)
    assert config.cpu.cores == (1, 2)
    assert config.discovery.proxies == ("tcp://a:1",)
    assert config.log.level is LogLevel.ERROR
    assert node(PDSERVE_PROXY="tcp://a:1,tcp://b:2").discovery.proxies == ("tcp://a:1", "tcp://b:2")
    assert node("--config", toml(tmp_path, '[cpu]\ncores = "0-3"\n')).cpu.cores == (0, 1, 2, 3)


def test_no_wait_may_take_days() -> None:
    """Every setting that is a time has an upper bound of a day or less."""
    a_day = {"s": 86_400, "ms": 86_400_000}
    times = {
        setting.flag: setting
        for root in ROOTS
        for setting in settings_of(root)
        if setting.field.endswith(("_s", "_ms")) and not setting.field.endswith("_per_s")
    }
    assert set(times) >= {"request-timeout-s", "connect-timeout-s", "idle-timeout-s", "write-timeout-s", "drain-s"}
    for flag, setting in times.items():
        assert setting.maximum is not None, flag
        assert setting.default <= setting.maximum <= a_day[setting.field.rpartition("_")[2]], flag
    with pytest.raises(ConfigError, match=r"--request-timeout-s: 216000000.0 was given.*to 86400"):
        node("--request-timeout-s", "216000000")
    with pytest.raises(ConfigError, match=r"PDSERVE_IDLE_TIMEOUT_S: 90000.0 was given"):
        load(ProxyConfig, [], {"PDSERVE_IDLE_TIMEOUT_S": "90000"}, prog="pdserve proxy")


def test_a_stream_interval_below_one_is_refused() -> None:
    for value in ("0", "-1", "1.5"):
        with pytest.raises(ConfigError, match="--stream-interval: "):
            node("--stream-interval", value)
    assert node(PDSERVE_STREAM_INTERVAL="1").stream.interval == 1


def test_api_keys_come_from_the_environment_too() -> None:
    keys = ("first-key-0123456789", "second-key-0123456789")
    config = load(ProxyConfig, [], {"PDSERVE_API_KEY": ",".join(keys)}, prog="pdserve proxy")
    assert config.admission.api_keys == keys
    assert "first-key" not in repr(config)


def test_every_command_of_a_model_takes_it_without_its_flag() -> None:
    # Doctor looks at a machine, and chat's first word may be an address.
    others = {DoctorConfig, ChatConfig}
    of_a_model = {root for root in ROOTS if any(each.flag == "model" for each in settings_of(root))} - others
    for root in of_a_model:
        assert load(root, ["org/name"], {}, prog="pdserve").model.path == "org/name"


def test_the_last_of_a_repeated_flag_counts() -> None:
    assert node("--block-size", "8", "--block-size", "32").cache.block_size == 32


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--blok-size", "8"], "unknown flag --blok-size of 'pdserve decode'; did you mean --block-size?"),
        (["--block-siz=8"], "unknown flag --block-siz of 'pdserve decode'; did you mean --block-size?"),
        (["--confg", "x"], "unknown flag --confg of 'pdserve decode'; did you mean --config?"),
        (["--zzz"], "unknown flag --zzz of 'pdserve decode'"),
        (["--control-port", "1"], "--control-port is not a setting of 'pdserve decode'"),
        (["--api-key", "s"], "--api-key is not a setting of 'pdserve decode': keys are the proxy's: 'pdserve proxy'"),
        (["demo", "stray"], "unexpected argument 'stray'"),
        (["--port"], "--port"),
        (["--port", "http"], "--port: 'http' was given; it takes a whole number from 0 to 65535"),
        (["--port", "65536"], "--port: 65536 was given; it takes a whole number from 0 to 65535"),
        (["--port", "-1"], "--port: -1 was given"),
        (["--drain-s", "nan"], "--drain-s: nan was given"),
        (["--kv-cache-mib", "-1"], "--kv-cache-mib: -1 was given; it takes auto or a whole number, at least 0"),
        (["--max-num-batched-tokens", "1"], "--max-num-batched-tokens (1) has to be at least twice --max-num-seqs"),
        (["--block-size", "12"], "--block-size: 12 was given; it takes a power of two"),
        (["--dtype", "int8"], "--dtype: 'int8' was given; it takes one of bfloat16, float32, auto, bf16, fp32, float"),
        (
            ["--dtype", "float16"],
            "--dtype: float16 was given; pdserve computes in bfloat16, which takes as much memory",
        ),
        (["--trust-remote-code"], "--trust-remote-code is not a setting of pdserve: pdserve never runs code that"),
        (
            ["--load-format=auto"],
            "--load-format is not a setting of pdserve: tokeniser and weights are",
        ),
        (["--cores", "0-x"], "--cores: '0-x' was given; it takes a list like 0,1,4-7"),
        (["--cores", "3-1"], "--cores: '3-1' was given"),
        (["--cores", "1,0-2"], "--cores: '1,0-2' names a number twice"),
        (["--proxy", "127.0.0.1:8100"], "--proxy: '127.0.0.1:8100' was given; it takes an address like tcp://"),
        (["--proxy", "tcp://127.0.0.1:99999"], "--proxy: "),
        (["--advertise", "node-1"], "--advertise: 'node-1' was given; it takes an address like http://"),
        (["--transfer-heartbeat-ms", "2000"], "--transfer-lease-ms (3000) has to be at least twice"),
        (["--ucx-net-devices", "eth0 eth1"], "--ucx-net-devices: 'eth0 eth1' was given; it takes names like eth0"),
        (["--ucx-net-devices", "mlx5_0:1//mlx5_1:1"], "--ucx-net-devices: 'mlx5_0:1//mlx5_1:1' was given"),
        (["--ucx-rails", "17"], "--ucx-rails"),
        (["--ucx-tcp-ports", "42000"], "--ucx-tcp-ports: '42000' was given; it takes a range like 42000-42999"),
        (["--ucx-tcp-ports", "42001-42000"], "--ucx-tcp-ports: '42001-42000' was given"),
        (["--ucx-tcp-ports", "0-10"], "--ucx-tcp-ports: '0-10' was given"),
        (["--ucx-tcp-ports", "60000-65536"], "--ucx-tcp-ports: '60000-65536' was given"),
        (["--host", ""], "--host: an empty address"),
        (["--cors-origins", "https://a.example/"], "--cors-origins: 'https://a.example/' was given; it takes '*', or"),
        (["--cors-origins", "*,null"], "--cors-origins: 'null' was given"),
        (["--cors-origins", "a.example"], "--cors-origins: 'a.example' was given"),
        (["--config", "/nowhere.toml"], "cannot read the settings file /nowhere.toml"),
    ],
)
def test_a_wrong_flag_is_told_what_would_be_right(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        node(*argv)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PDSERVE_BLOCKSIZE", "8", "unknown environment variable PDSERVE_BLOCKSIZE; did you mean PDSERVE_BLOCK_SIZE?"),
        ("PDSERVE_BLOCK_SIZE", "x", "PDSERVE_BLOCK_SIZE: 'x' was given; it takes a whole number"),
        ("PDSERVE_QQ", "8", "unknown environment variable PDSERVE_QQ"),
    ],
)
def test_a_wrong_variable_is_told_what_would_be_right(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        node(**{name: value})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cahce]\n", "unknown section [cahce]; did you mean cache?"),
        ("cache = 1\n", "cache has to be a table"),
        ("[cache]\nblok-size = 1\n", "cache.blok-size is not a setting; did you mean block-size?"),
        ("[cache]\ndtype = 'bf16'\n", "cache.dtype is not a setting; did you mean model.dtype?"),
        ("[cache]\nblock_size = '16'\n", "cache.block_size: '16' was given; it takes a whole number"),
        ("[cache]\nblock_size = true\n", "cache.block_size: True was given"),
        ("[cache]\nblock_size = 1.5\n", "cache.block_size: 1.5 was given"),
        ("[cache]\nblock_size = 0\n", "cache.block_size: 0 was given"),
        ("[cache]\nblock_size = 16\nblock-size = 16\n", "cache.block-size is given twice"),
        ("[http]\nhost = 1\n", "http.host: 1 was given; it takes text"),
        ("[cpu]\ncores = [-1]\n", "cpu.cores"),
        ("[cache\n", "is not TOML"),
    ],
)
def test_a_wrong_file_is_told_what_would_be_right(tmp_path: Path, text: str, message: str) -> None:
    file = toml(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        node("--config", file)
    assert message in str(caught.value)
    assert file in str(caught.value)


def test_what_another_subcommand_knows_may_be_in_the_environment_and_the_file(tmp_path: Path) -> None:
    file = toml(tmp_path, "[registry]\ncontrol-port = 5\n[cluster]\nprefill = 3\n")
    assert node("--config", file, PDSERVE_CONTROL_PORT="5", PDSERVE_ASK="hello") == NodeConfig()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--decode", "0"], "--decode and --mixed are both 0"),
        (["--prefill", "0"], "--decode is 1, --prefill and --mixed are 0"),
        (["--prefill", "-1"], "--prefill: -1 was given"),
    ],
)
def test_a_cluster_that_could_not_answer_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(UpConfig, argv, {}, prog="pdserve up")
    assert message in str(caught.value)


def test_a_configuration_survives_the_environment() -> None:
    config = node(
        "--cores", "0,2-3", "--proxy", "tcp://a:1", "--proxy", "tcp://b:2", "--dtype", "fp32", "--drain-s", "0.5"
    )
    assert node(**to_environ(config)) == config
    assert to_environ(NodeConfig())["PDSERVE_PROXY"] == ""


@pytest.mark.parametrize(
    "wrong", [["--secrte", "hunter2hunter2hunter2"], ["--secret", "hunter2hunter2hunter2", "--oops"]]
)
def test_no_error_shows_a_secret(wrong: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        node(*wrong)
    assert "hunter2" not in str(caught.value)


def test_no_representation_shows_a_secret(tmp_path: Path) -> None:
    config = node("--secret", "hunter2hunter2hunter2")
    assert config.security.secret == "hunter2hunter2hunter2"
    assert "hunter2" not in repr(config)
    assert "hunter2" not in str(to_environ(config))
    with pytest.raises(ConfigError) as caught:
        node("--config", toml(tmp_path, "[security]\nsecret = 424242424242\n"))
    assert "4242" not in str(caught.value)


def test_a_step_must_hold_more_than_the_running_requests() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens \(64\).*--max-num-seqs \(64\)"):
        load(NodeConfig, ["--max-num-batched-tokens", "64", "--max-num-seqs", "64"], {}, prog="x")
