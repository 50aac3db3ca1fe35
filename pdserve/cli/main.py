"""``pdserve <subcommand>`` finds the subcommand, and turns pdserve's errors into a line and an exit status."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, MutableMapping, Sequence

from pdserve.errors import ConfigError, ModelError, PdserveError
from pdserve.log_format import printable
from pdserve.process import die_with_parent, loading_libraries
from pdserve.settings.sources import suggestion

SUBCOMMANDS = {
    "up": "a whole cluster on this machine: pdserve up MODEL",
    "serve": "the same as up: pdserve serve MODEL",
    "pull": "fetches a model into the cache of Hugging Face models: pdserve pull MODEL",
    "models": "lists that cache, and says what can be served: pdserve models [MODEL]",
    "chat": "talks to a model in the terminal: pdserve chat MODEL|URL",
    "proxy": "the address that clients talk to; spreads requests over the nodes",
    "prefill": "a node that computes the KV cache of prompts for decode nodes",
    "decode": "a node that answers requests, with prompts computed by prefill nodes",
    "mixed": "a node that does both in one engine",
    "role": "gives a running node another role: pdserve role NODE prefill|decode|mixed",
    "drain": "empties a running node and ends it: pdserve drain NODE",
    "top": "shows a cluster while it works: nodes, requests, rates, and what went wrong",
    "live": "asks the server of this container whether it lives; for HEALTHCHECK and exec probes",
    "trace": "draws what happened to a request, and when: pdserve trace REQUEST_ID",
    "doctor": "looks at this machine and at peers, and says what to do; before calling for help",
    "plan": "says how many nodes a load needs (plan profile measures a node); what a KV cache takes (plan memory)",
    "bench": "measures this machine, an engine or a server; pdserve bench lists what",
    "completion": "prints a script by which a shell completes all this: pdserve completion bash",
}

ALIASES = {"run": "chat"}
"""Other names of subcommands, which users of other servers type."""

_INSTEAD = {
    "help": "'pdserve --help' lists the subcommands",
    "version": "'pdserve --version' prints the version",
    "list": "'pdserve models' lists the models on this machine",
    "ls": "'pdserve models' lists the models on this machine",
    "show": "'pdserve models' lists the models on this machine, and whether they can be served",
    "download": "'pdserve pull MODEL' downloads a model",
    "rm": "'pdserve models MODEL' says in which folder a model is: delete that",
    "ps": "'pdserve top' shows a cluster's nodes and requests, and 'pdserve top --once' prints them",
    "stop": "'pdserve drain NODE' ends a node after its answers, and Ctrl-C ends 'pdserve up'",
    "create": "there are no Modelfiles: 'pdserve chat --system TEXT' sets a system prompt, and requests say the rest",
    "complete": "'pdserve chat MODEL < FILE' answers the text of a file",
    "collect-env": "'pdserve doctor' looks at this machine",
    "generate": "'pdserve chat MODEL --ask TEXT' answers one question",
}
"""What is right in place of the subcommands that llama.cpp, Ollama and vLLM have and pdserve has not."""

_RUNS = {
    "up": ("pdserve.cli.up.command", "run"),
    "serve": ("pdserve.cli.up.command", "serve"),
    "pull": ("pdserve.cli.models", "pull"),
    "models": ("pdserve.cli.models", "run"),
    "chat": ("pdserve.cli.chat.command", "run"),
    "proxy": ("pdserve.cli.servers", "run_proxy"),
    "prefill": ("pdserve.cli.servers", "run_prefill"),
    "decode": ("pdserve.cli.servers", "run_decode"),
    "mixed": ("pdserve.cli.servers", "run_mixed"),
    "role": ("pdserve.cli.node_commands", "change_role"),
    "drain": ("pdserve.cli.node_commands", "drain"),
    "top": ("pdserve.cli.watch.top", "run"),
    "live": ("pdserve.cli.live", "run"),
    "trace": ("pdserve.cli.watch.trace", "run"),
    "doctor": ("pdserve.cli.doctor", "run"),
    "plan": ("pdserve.cli.plan", "run"),
    "bench": ("pdserve.cli.bench", "run"),
    "completion": ("pdserve.cli.completion", "run"),
}
"""The module and the function that run each subcommand. It is imported when it is needed."""

_READER_LEFT = 128 + signal.SIGPIPE
"""The exit status that a shell reports for a command that SIGPIPE has ended."""

USAGE = "\n".join(
    [
        "usage: pdserve SUBCOMMAND [--flag value ...]",
        "",
        "Disaggregated prefill/decode serving of large language models.",
        "",
        *(f"  {name:12}{summary}" for name, summary in SUBCOMMANDS.items()),
        "",
        "  pdserve SUBCOMMAND --help shows what is set first, and --help-all every setting.",
        "  pdserve --version prints the version.",
        "",
        "A cluster on this machine, and one question to it:",
        "",
        "  pdserve up demo --ask 'What is a KV cache?'",
    ]
)


def main(argv: Sequence[str] | None = None, environ: MutableMapping[str, str] = os.environ) -> int:
    """Runs one subcommand and returns the exit status: 2 for a wrong setting or model, 130 after Ctrl-C."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    if name == "--version":
        # Only this subcommand needs the module, which takes long to load.
        from pdserve.wire.version import INSTALLED_VERSION

        print(f"pdserve {INSTALLED_VERSION}")
        return 0
    if not name:
        print(USAGE, file=sys.stderr)
        return 2
    name = ALIASES.get(name, name)
    if name not in SUBCOMMANDS:
        print(f"pdserve: {_unknown(name)}", file=sys.stderr)
        return 2
    return _run(name, rest, environ)


def _unknown(name: str) -> str:
    """Returns one sentence on a word that is no subcommand."""
    if name in _INSTEAD:
        return f"there is no subcommand {name!r}: {_INSTEAD[name]}"
    if name.startswith("-"):
        return f"a subcommand comes before {name}, as in 'pdserve up {name}'; 'pdserve --help' lists them"
    if "/" in name or name.endswith(".gguf"):
        return f"unknown subcommand {name!r}; to talk to a model or a server: pdserve chat {name}"
    near = suggestion(name, [*SUBCOMMANDS, *ALIASES])
    return f"unknown subcommand {name!r}{near}{'' if near else '; see pdserve --help'}"


def _run(name: str, argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
    die_with_parent(environ)

    def subcommand() -> int:
        module, function = _RUNS[name]
        with loading_libraries():
            run = getattr(importlib.import_module(module), function)
        status: int = run(argv, environ)
        return status

    return status_of(f"pdserve {name}", subcommand)


def status_of(prog: str, work: Callable[[], int]) -> int:
    """Returns the exit status of ``work``. An error of pdserve's becomes a line on standard error, after ``prog``."""
    try:
        status = work()
        sys.stdout.flush()
        return status
    except (ConfigError, ModelError) as error:
        print(f"{prog}: {printable(str(error))}", file=sys.stderr)
        return 2
    except PdserveError as error:
        print(f"{prog}: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        return _READER_LEFT


def _reader_has_left() -> bool:
    """Returns whether nobody reads the standard output any more, as after ``| head``, and lets the rest of it go."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
