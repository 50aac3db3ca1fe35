"""Writes ``docs/configuration.md`` from the settings themselves: ``python -m tests.docs.configuration_table``."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from pdserve.config import (
    ChatConfig,
    DoctorConfig,
    DrainConfig,
    LiveConfig,
    ModelsConfig,
    NodeConfig,
    PlanConfig,
    ProxyConfig,
    RequestTraceConfig,
    RoleConfig,
    TopConfig,
    UpConfig,
)
from pdserve.config.bench import (
    BenchCompareConfig,
    BenchEngineConfig,
    BenchLoadConfig,
    BenchTransferConfig,
    PlanMemoryConfig,
    PlanProfileConfig,
)
from pdserve.settings.setting import Setting, settings_of
from pdserve.settings.sources import shown_default

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"

_HEAD = """# Configuration

A flag wins over its environment variable, the variable over the TOML file of `--config` (or `PDSERVE_CONFIG`), and the
file over the default. A misspelt name is an error, which names the nearest right one. Variables and file may have
settings of other subcommands, so all processes of a host can share them. Names that begin with `PDSERVE_` are reserved.

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

Commas separate lists in the environment: `PDSERVE_PROXY=tcp://10.0.0.1:8100,tcp://10.0.0.2:8100`.
`python -m tests.docs.configuration_table` writes this page.
"""

_ROOTS = {
    "Nodes": NodeConfig,
    "`pdserve proxy`": ProxyConfig,
    "`pdserve up`": UpConfig,
    "`pdserve chat`": ChatConfig,
    "`pdserve models`": ModelsConfig,
    "`pdserve doctor`": DoctorConfig,
    "`pdserve role`": RoleConfig,
    "`pdserve drain`": DrainConfig,
    "`pdserve top`": TopConfig,
    "`pdserve live`": LiveConfig,
    "`pdserve trace`": RequestTraceConfig,
    "`pdserve plan`": PlanConfig,
    "`pdserve plan profile`": PlanProfileConfig,
    "`pdserve plan memory`": PlanMemoryConfig,
    "`pdserve bench engine`": BenchEngineConfig,
    "`pdserve bench load`": BenchLoadConfig,
    "`pdserve bench transfer`": BenchTransferConfig,
    "`pdserve bench compare`": BenchCompareConfig,
}
_ABOUT = {"Nodes": ["`pdserve prefill`, `pdserve decode` and `pdserve mixed` take these.", ""]}


def render() -> str:
    """Returns the whole page. A setting that several subcommands share is explained once, at the first of them."""
    explained: dict[str, str] = {}
    return "\n".join([_HEAD, *(_root(title, root, explained) for title, root in _ROOTS.items())])


def _root(title: str, root: type, explained: dict[str, str]) -> str:
    lines, elsewhere = [f"## {title}", "", *_ABOUT.get(title, [])], dict[str, list[str]]()
    for (section, heading), group in groupby(settings_of(root), key=lambda setting: (setting.section, setting.title)):
        rows = {_row(setting): f"`--{setting.flag}`" for setting in group}
        own = [row for row in rows if row not in explained]
        if own:
            head = ["| flag | variable | default | |", "|---|---|---|---|"]
            lines += [f"### `[{section}]` {heading}", "", *head, *own, ""]
        places = {explained[row] for row in rows if row in explained}
        for where in sorted(places):
            # Of a section that is all there, the name is enough.
            shared = [flag for row, flag in rows.items() if explained.get(row) == where]
            elsewhere.setdefault(where, []).extend([f"`[{section}]`"] if len(shared) == len(rows) > 2 else shared)
        explained |= dict.fromkeys(own, title)
    if elsewhere:
        also = (f"from [{where}](#{_anchor(where)}) {', '.join(names)}" for where, names in elsewhere.items())
        lines += [f"The same as elsewhere on this page: {'; '.join(also)}.", ""]
    return "\n".join(lines)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _row(setting: Setting) -> str:
    default = "" if setting.secret or setting.default in ("", ()) else f"`{shown_default(setting)}`"
    return f"| `--{setting.flag}` | `{setting.env}` | {default} | {setting.help} |"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
