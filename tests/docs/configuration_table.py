"""Writes ``docs/configuration.md`` from the settings themselves: ``python -m tests.docs.configuration_table``."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from pdserve.bench_config import (
    BenchBatchingConfig,
    BenchCompareConfig,
    BenchEngineConfig,
    BenchFailoverConfig,
    BenchGoodputConfig,
    BenchLoadConfig,
    BenchPlanConfig,
    BenchProxyConfig,
    BenchRolesConfig,
    BenchStreamConfig,
    BenchTransferConfig,
    BenchTurnsConfig,
    PlanProfileConfig,
)
from pdserve.config import (
    DoctorConfig,
    DrainConfig,
    LiveConfig,
    NodeConfig,
    PlanConfig,
    ProxyConfig,
    RequestTraceConfig,
    RoleConfig,
    TopConfig,
    UpConfig,
)
from pdserve.settings.setting import Setting, settings_of, to_text

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"

_HEAD = """# Configuration

A flag wins over its environment variable, the variable wins over the TOML file of `--config` (or `PDSERVE_CONFIG`),
and the file wins over the default. A misspelt flag, variable, section or key is an error, which names the nearest
right one. The variables and the file may have settings of other subcommands, so all processes of a host can share
them. Every name that begins with `PDSERVE_` is reserved.

```toml
# pdserve decode --config decode.toml
[model]
model = "/models/smollm2"

[cache]
kv-cache-mib = 4096

[discovery]
proxy = ["tcp://10.0.0.1:8100"]

[cpu]
cores = "0-7"
```

In the environment, lists are separated by commas: `PDSERVE_PROXY=tcp://10.0.0.1:8100,tcp://10.0.0.2:8100`.

This page is written by `python -m tests.docs.configuration_table`; the texts come from `pdserve/config.py` and
`pdserve/bench_config.py`.
"""

_ROOTS = {
    "`pdserve prefill`, `pdserve decode`, `pdserve mixed`": NodeConfig,
    "`pdserve proxy`": ProxyConfig,
    "`pdserve up`": UpConfig,
    "`pdserve doctor`": DoctorConfig,
    "`pdserve role`": RoleConfig,
    "`pdserve drain`": DrainConfig,
    "`pdserve top`": TopConfig,
    "`pdserve live`": LiveConfig,
    "`pdserve trace`": RequestTraceConfig,
    "`pdserve plan`": PlanConfig,
    "`pdserve plan profile`": PlanProfileConfig,
    "`pdserve bench batching`": BenchBatchingConfig,
    "`pdserve bench engine`": BenchEngineConfig,
    "`pdserve bench load`": BenchLoadConfig,
    "`pdserve bench stream`": BenchStreamConfig,
    "`pdserve bench transfer`": BenchTransferConfig,
    "`pdserve bench proxy`": BenchProxyConfig,
    "`pdserve bench failover`": BenchFailoverConfig,
    "`pdserve bench roles`": BenchRolesConfig,
    "`pdserve bench turns`": BenchTurnsConfig,
    "`pdserve bench plan`": BenchPlanConfig,
    "`pdserve bench goodput`": BenchGoodputConfig,
    "`pdserve bench compare`": BenchCompareConfig,
}


def render() -> str:
    """Returns the whole page."""
    return "\n".join([_HEAD, *(_root(title, root) for title, root in _ROOTS.items())])


def _root(title: str, root: type) -> str:
    lines = [f"## {title}", ""]
    for (section, heading), group in groupby(settings_of(root), key=lambda setting: (setting.section, setting.title)):
        lines += [f"### `[{section}]` {heading}", "", "| flag | variable | default | |", "|---|---|---|---|"]
        lines += [_row(setting) for setting in group]
        lines.append("")
    return "\n".join(lines)


def _row(setting: Setting) -> str:
    default = "" if setting.secret or setting.default in ("", ()) else f"`{to_text(setting.default)}`"
    return f"| `--{setting.flag}` | `{setting.env}` | {default} | {setting.help} |"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
