"""Tests what deploy/ucx/build.sh does around UCX's own build: a small tree stands in for UCX's sources."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY

GIT = """#!/bin/sh
case "$*" in
*cat-file*) ;;
*archive*) exec tar -C "$FAKE_UCX" -c . ;;
*) exit 9 ;;
esac
"""
CONFIGURE = """#!/bin/sh
for word; do case $word in --prefix=*) echo "prefix = ${word#--prefix=}" > settings.mk ;; esac; done
"""
MODULES = ("libuct_ib", "libuct_ib_mlx5", "libuct_rdmacm")
LIBRARIES = ("libucs", "libucs_signal", "libuct", "libucp", "libucm")
MAKEFILE = f"""include settings.mk
all:
install-strip:
\tmkdir -p $(DESTDIR)$(prefix)/lib/ucx $(DESTDIR)$(prefix)/bin
\tfor name in {" ".join(LIBRARIES)}; do touch $(DESTDIR)$(prefix)/lib/$$name.so $(DESTDIR)$(prefix)/lib/$$name.la; done
\tfor name in {" ".join(MODULES)}; do touch $(DESTDIR)$(prefix)/lib/ucx/$$name.so; done
\tprintf '#!/bin/sh\\necho 1.21.0\\n' > $(DESTDIR)$(prefix)/bin/ucx_info
\tchmod +x $(DESTDIR)$(prefix)/bin/ucx_info
"""


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.integration
def test_files_of_others_in_the_prefix_stay_as_they_are(tmp_path: Path) -> None:
    source, programs, prefix = tmp_path / "ucx", tmp_path / "programs", tmp_path / "usr"
    for folder in (source, programs, prefix / "lib"):
        folder.mkdir(parents=True)
    executable(source / "configure", CONFIGURE)
    (source / "Makefile").write_text(MAKEFILE)
    executable(programs / "git", GIT)
    executable(programs / "autoreconf", "#!/bin/sh\n")
    theirs = prefix / "lib" / "libtheirs.la"
    theirs.write_text("theirs")
    (prefix / "lib").chmod(0o2775)
    environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "FAKE_UCX": str(source)}
    command: list[str | Path] = [DEPLOY / "ucx" / "build.sh", "--prefix", prefix, "--source", source]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, umask=0o077)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("1.21.0\n")
    assert theirs.read_text() == "theirs"
    assert [path.name for path in prefix.rglob("*.la")] == ["libtheirs.la"]
    assert (prefix / "lib").stat().st_mode & 0o7777 == 0o2775
    assert {path.stem for path in (prefix / "lib").glob("*.so")} == set(LIBRARIES)
